"""Flattens a record: nested values get names like `time_split/forward`, which wandb and TensorBoard show as groups."""

from collections.abc import Mapping
from typing import Any


def flat_values(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a record by name. Values that are not known (None) are left out."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= flat_values(value, f"{prefix}{name}/")
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat
