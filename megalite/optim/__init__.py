"""Buffers of parameters and gradients, their sync, ZeRO-1, AdamW."""
