"""How numbers and values are told to people, wherever they are told."""


def rounded(value: float) -> float:
    """The number without the digits that computing has blurred: 3e-05 for 2.9999999999999997e-05."""
    return float(f"{value:.12g}")


def plain_number(value: float) -> str:
    """The number as one writes it: 3e-4, 0.1."""
    if 0 < abs(value) < 0.001 or abs(value) >= 1e15:
        digits, _, power = f"{value:.11e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}" if power else digits
    return f"{value:.12g}"


def plain(value: object) -> str:
    """A setting as one writes it: 3e-4, 0.1, [1,2], null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    return plain_number(value) if isinstance(value, float) else str(value)


def several(number: float, what: str) -> str:
    """1 layer, 12 layers, 2 batches, 0.5 epochs."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {what}{'' if text == '1' else 'es' if what.endswith('tch') else 's'}"
