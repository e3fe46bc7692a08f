"""The GPT as mathematics, one pipeline stage of it."""
