"""Parameters with a learning rate or weight decay of their own: the entries of optimizer.groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters whose logical names fit the glob `match`, and what they have in place of the usual; None: the
    usual."""

    match: str
    lr: float | str | None = None  # a peak, or a factor of the usual one: 0.1x
    weight_decay: float | None = None

    def applied(self, factor: float, decay: float, peak: float) -> tuple[float, float]:
        """Factor of the schedule's rate, whose peak is `peak`, and weight decay, from the usual ones."""
        if isinstance(self.lr, str):
            factor *= float(self.lr[:-1])
        elif self.lr is not None:
            factor = self.lr / peak
        return factor, decay if self.weight_decay is None else self.weight_decay


KEYS = [field.name for field in fields(ParameterGroup)]


def flaws_of_groups(groups: Sequence[Mapping[Any, Any]]) -> list[str]:
    """All that is wrong with the entries, whatever the model."""
    found = []
    for number, group in enumerate(groups, start=1):
        unknown, rate, match = [str(key) for key in group if key not in KEYS], group.get("lr"), group.get("match")
        factor = isinstance(rate, str) and rate.endswith("x") and _is_amount(rate[:-1])
        tests = {
            f"has unknown keys ({', '.join(unknown)}) beside {', '.join(KEYS)}": unknown,
            "needs match, a pattern of names": not (isinstance(match, str) and match),
            "sets neither lr nor weight_decay": not {"lr", "weight_decay"} & group.keys(),
            "has an lr that is neither a number from 0 on nor a factor like 0.1x": "lr" in group
            and not (factor or (not isinstance(rate, str) and _is_amount(rate))),
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
