"""Compares a layout with one process."""
