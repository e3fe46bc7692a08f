"""Views of a run: terminal, report, wandb, TensorBoard."""
