"""The settings, and every rule that joins two of them."""
