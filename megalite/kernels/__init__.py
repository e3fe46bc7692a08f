"""Faster equivalents of plain operations, each beside the plain form."""
