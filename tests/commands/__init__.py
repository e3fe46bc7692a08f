"""Tests of megalite/commands that have no room of their own."""
