"""Keeps the libraries of Hugging Face off the network."""

import os
import sys


def go_offline() -> None:
    """Make them use their caches alone. They read the variable when they are imported, so those that are imported
    already are told as well."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
