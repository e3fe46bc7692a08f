"""Schedules as data, and the executor that performs them."""
