"""A learning rate's schedule as points of (share of the steps, factor of the peak): lr.table."""

import math
from collections.abc import Sequence

from megalite.config.groups import LARGEST, NUMBER


def flaws_of_table(points: Sequence[Sequence[float]]) -> list[str]:
    """All that is wrong with the points."""
    found, before = [], -1.0
    for number, point in enumerate(points, start=1):
        if len(point) != 2 or not all(map(math.isfinite, point)):
            found.append(f"entry {number} is not two finite numbers, a share of the steps and a factor of the peak")
            continue
        share, factor = point
        tests = {
            "has a share of the steps outside 0 to 1": not 0 <= share <= 1,
            "has a share that is not above the one before": share <= before,
            f"has a factor that is not {NUMBER}": not 0 <= factor <= LARGEST,
        }
        found += [f"entry {number} {flaw}" for flaw, is_so in tests.items() if is_so]
        before = share
    return found
