"""From and to transformers' models, and what is done with a trained one."""
