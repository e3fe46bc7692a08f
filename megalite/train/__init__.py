"""Set-up, loop, step, evaluation, samples of text, checkpoints, and the record of a run."""
