"""Parameters with a learning rate or weight decay of their own: the entries of optimizer.groups."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

KEYS = ("match", "lr", "weight_decay")


def flaws_of_groups(groups: Sequence[Mapping[Any, Any]]) -> list[str]:
    """All that is wrong with the entries, whatever the model."""
    found = []
    for number, group in enumerate(groups, start=1):
        unknown, rate, match = [str(key) for key in group if key not in KEYS], group.get("lr", 0), group.get("match")
        amount = rate if not isinstance(rate, str) else rate[:-1] if rate.endswith("x") else None
        tests = {
            f"has unknown keys ({', '.join(unknown)}) beside {', '.join(KEYS)}": unknown,
            "needs match, a pattern of names": not (isinstance(match, str) and match),
            "sets neither lr nor weight_decay": not {"lr", "weight_decay"} & group.keys(),
            "has an lr that is neither a number from 0 on nor a factor like 0.1x": not _is_amount(amount),
            "has a weight_decay that is no number from 0 on": not _is_amount(group.get("weight_decay", 0)),
        }
        found += [f"entry {number} {flaw}" for flaw, is_so in tests.items() if is_so]
    return found


def _is_amount(value: Any) -> bool:
    """Whether it is a finite number of at least 0, or the text of one."""
    try:
        return not isinstance(value, bool) and 0 <= float(value) < math.inf
    except (TypeError, ValueError):
        return False
