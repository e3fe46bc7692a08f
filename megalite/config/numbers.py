"""Whole numbers as people write them: 20000, 2e4, 20K, 1.5B; 512Ki is 512 times 1024."""

import re
from fractions import Fraction

UNITS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
UNITS |= {f"{letter}i": 1 << power for letter, power in zip("KMGT", (10, 20, 30, 40), strict=True)}
_WRITTEN = re.compile(rf"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))({'|'.join(sorted(UNITS, key=len, reverse=True))})")


def whole_number(value: float | str) -> int:
    """The whole number that a value is, or that a text writes; ValueError for any other."""
    if isinstance(value, str):
        if found := _WRITTEN.fullmatch(value.strip()):
            exact = Fraction(found[1]) * UNITS[found[2]]
            value = exact.numerator if exact.denominator == 1 else float("nan")
        else:
            value = float(value) if re.search("[.eE]", value) else int(value)
    if isinstance(value, float) and not value.is_integer():  # infinite, or no number, too
        raise ValueError(value)
    return int(value)
