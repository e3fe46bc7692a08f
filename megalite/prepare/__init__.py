"""From text to token files."""
