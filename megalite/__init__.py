"""megalite: GPT pretraining from a laptop's CPU to a cluster of GPUs. Start reading at pretrain_gpt.py."""

__version__ = "0.1.0"
