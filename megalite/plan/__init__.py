"""Tables and pictures of ranks, schedules and buffers."""
