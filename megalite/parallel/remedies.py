"""What the rules of layouts and of stages share when they look for values that would work, and tell them.

No torch import.
"""

from collections.abc import Sequence
from typing import Any


def is_whole(value: object, at_least: int) -> bool:
    """Whether `value` is a whole number of at least that size; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def number_meant(given: Any) -> int:
    """The whole number that was most likely meant: 4 for 4.0 and "4", 0 for what is no number."""
    try:
        return given if is_whole(given, 0) else int(float(given))
    except (TypeError, ValueError, OverflowError):
        return 0


def told(name: str, values: Sequence[Any]) -> str:
    """`pp=2 or 4`, `leave layout unset`."""
    shown = [repr(value) for value in sorted(value for value in values if is_whole(value, 0))]
    shown += [repr(value) for value in values if isinstance(value, str)]
    parts = [f"{name}={' or '.join(shown)}"] if shown else []
    if any(value is None or value is False for value in values):
        parts.append(f"leave {name} unset")
    return ", or ".join(parts)
