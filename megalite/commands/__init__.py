"""What people start: a module per command with its `main`, which scripts/ and `megalite COMMAND` call."""
