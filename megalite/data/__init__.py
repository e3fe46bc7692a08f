"""From token files to samples to batches."""
