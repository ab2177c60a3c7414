"""The evaluation protocol: which model, when, on whom, averaged how, at what cost."""
