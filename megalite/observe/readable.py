"""Numbers as people read them: a few significant digits, a unit, a known width. nan and inf stay so.

A limit between two forms lies where rounding to the smaller one would outgrow its width.
"""

import math


def loss(value: float) -> str:
    """A loss or gradient norm: four decimals where they fit, otherwise scientific. At most 8 characters."""
    if math.isfinite(value) and (abs(value) >= 999.99995 or 0 < abs(value) < 0.001):
        return f"{value:.2e}"
    return f"{value:.4f}"


def rate(value: float) -> str:
    """Tokens per second. At most 7 characters below a thousand billion."""
    if not math.isfinite(value) or abs(value) < 10:
        return f"{value:.2f}"
    if abs(value) < 999_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e6:,.2f}M" if abs(value) < 999.995e6 else f"{value / 1e9:,.2f}B"


def short(value: float) -> str:
    """A number on an axis in a few characters: 0.02, 1.5, 20k, 3M, 1e-5."""
    size = abs(value)
    if size and (size < 0.001 or size >= 1e15):
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in the largest fitting power of 1000."""
    for divisor, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= divisor:
            return f"{value / divisor:.1f} {letter}"
    return f"{value:.0f} B"


def percent(share: float) -> str:
    """A share of 1, as three digits at most. At most 5 characters."""
    return f"{100 * share:.1f}%" if not share >= 0.9995 else f"{100 * share:.0f}%"


def perplexity(value: float) -> str:
    """exp(loss): large at the start, a few units at the end."""
    return f"{value:.2e}" if value >= 1e6 else f"{value:,.2f}"


def gibibytes(value: float) -> str:
    """Memory without its unit. At most 6 characters below 10 TiB."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def step_time(seconds: float) -> str:
    """Time of one step. At most 8 characters."""
    if seconds < 0.99995:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def duration(seconds: float) -> str:
    """A length of time: 0:42, 12:34, 1:02:03 or 3d 04h. At most 8 characters."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
