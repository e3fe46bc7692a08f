"""From a started process to a device and process groups, and to an orderly end."""
