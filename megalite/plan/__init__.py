"""Pictures and tables of ranks, schedules and buffers."""
