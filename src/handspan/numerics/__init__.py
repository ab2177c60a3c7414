"""Building blocks that several methods share: optimisers, averaging, linear algebra."""
