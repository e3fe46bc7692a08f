"""How numbers and values are written for people."""

import re


def rounded(value: float) -> float:
    """The number without the digits that computing has blurred: 3e-05 for 2.9999999999999997e-05."""
    return float(f"{value:.12g}")


def plain(value: object) -> str:
    """A setting as one writes it: 3e-4, 0.1, [1,2], null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.11e}" if 0 < abs(value) < 0.001 or abs(value) >= 1e15 else f"{value:.12g}"
    return re.sub(r"\.?0*e(-?)\+?0*", r"e\1", text)


def several(number: float, what: str) -> str:
    """1 layer, 12 layers, 2 batches, 0.5 epochs."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {what}{'' if text == '1' else 'es' if what.endswith('tch') else 's'}"
