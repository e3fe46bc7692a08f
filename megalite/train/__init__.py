"""Build, step, loop, evaluate, sample, save, resume; a recorder is told what happens."""
