"""One module per method, found through the entry-point group ``handspan.methods``."""
