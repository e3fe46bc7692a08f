"""Named logical tensors to disk and back, for any layout."""
