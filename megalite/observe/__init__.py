"""What a run records: to the terminal, report, wandb, TensorBoard."""
