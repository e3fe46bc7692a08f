"""One layer across several ranks: mappings, linear layers, the loss."""
