"""Parameters with a learning rate or weight decay of their own: the entries of optimizer.groups."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

KEYS = ("match", "lr", "weight_decay")
FACTOR = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?x")
LARGEST, NUMBER = 1e30, "a number from 0 to 1e30"  # fp32 holds it, with room for products


def flaws_of_groups(groups: Sequence[Mapping[Any, Any]]) -> list[str]:
    """All that is wrong with the entries, whatever the model."""
    found = []
    for number, group in enumerate(groups, start=1):
        unknown, match = [str(key) for key in group if key not in KEYS], group.get("match")
        rate, decay = group.get("lr", 0), group.get("weight_decay", 0)
        if isinstance(rate, str):
            rate = float(rate[:-1]) if FACTOR.fullmatch(rate) else None
        tests = {
            f"has unknown keys ({', '.join(unknown)}) beside {', '.join(KEYS)}": unknown,
            "needs match, a pattern of names": not (isinstance(match, str) and match),
            "sets neither lr nor weight_decay": not {"lr", "weight_decay"} & group.keys(),
            f"has an lr that is neither {NUMBER} nor a factor like 0.1x (digits, then x)": not _is_amount(rate),
            f"has a weight_decay that is not {NUMBER} (text is none)": not _is_amount(decay),
        }
        found += [f"entry {number} {flaw}" for flaw, is_so in tests.items() if is_so]
    return found


def _is_amount(value: Any) -> bool:
    """Whether it is a NUMBER. The text of a number is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
