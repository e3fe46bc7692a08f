"""A layout of stages as the user writes it, read into layers per stage.

The text form is Megatron-LM's: `E` embedding, `t` one transformer layer, `L` loss, `|` the border of two stages, `*n`
repeats the symbol or the parenthesised group before it; commas and blanks mean nothing. `Et*3|(tt|)*2,L` is 3, 2, 2 and
0 layers; two borders in a row, or a stage of E or L alone, ask for a stage without layers. E opens the first stage and
L closes the last, so the layers per stage say everything. Megatron's `m` (multi-token prediction) is refused: it is not
built.
"""

import re
from collections.abc import Sequence

LONGEST = 100_000  # symbols after repetition: more is a slip of the pen, and would only fill the memory

Layout = str | Sequence[str | int]


class LayoutError(ValueError):
    """A layout that cannot be read; the text says which rule it breaks, and where."""


def layout_counts(layout: Layout) -> tuple[int, ...]:
    """Layers of every stage, in stage order.

    `layout` is the text form, or a list with one entry for each stage: either all counts (`[3, 4, 4, 1]`) or all
    symbols (`["Ettt", "t*4", "t*4", "tL"]`). Raises `LayoutError`, with positions counted from 1.
    """
    if isinstance(layout, str):
        stages = _stages(_expand(layout))
    elif not isinstance(layout, Sequence) or not layout:
        raise LayoutError(f"must be text like 'Ett|tt|ttL', or a list with one entry for each stage, not {layout!r}")
    elif all(isinstance(entry, int) and not isinstance(entry, bool) for entry in layout):
        return _counts_as_given([int(entry) for entry in layout])
    elif all(isinstance(entry, str) for entry in layout):
        stages = [_one_stage(str(entry), number) for number, entry in enumerate(layout, 1)]
    else:
        raise LayoutError("the entries of the list must be all whole numbers or all symbols")
    _check_ends(stages)
    return tuple(sum(symbol == "t" for symbol, _ in stage) for stage in stages)


def example_layout(num_layers: int, stages: int) -> str:
    """The text form of `num_layers` spread over `stages`, the first stages taking one more where it is uneven."""
    each, longer = divmod(num_layers, stages)

    def run(count: int, of: int) -> str:
        body = "t" * count if count < 3 else f"t*{count}"
        return "" if of == 0 else f"{body}|" if of == 1 else f"({body}|)*{of}"

    return f"E{run(each + 1, longer)}{run(each, stages - longer - 1)}{run(each, 1)[:-1]}L"


def layout_text(counts: Sequence[int]) -> str:
    """The text form of so many layers on each stage."""
    return f"E{'|'.join('t' * count for count in counts)}L"


def without_prediction(layout: str) -> str:
    """The text with its `m` symbols, and their repeats, taken out."""
    return re.sub(r"m[,\s]*(?:\*[,\s]*\d+)?", "", layout)


Symbol = tuple[str, str]  # one of E, t, L and |, and where it stands


def _counts_as_given(counts: list[int]) -> tuple[int, ...]:
    for number, count in enumerate(counts, 1):
        if count < 0:
            raise LayoutError(f"stage {number} of the list: {count} layers is less than none")
    return tuple(counts)


def _one_stage(text: str, number: int) -> list[Symbol]:
    stage = _expand(text, f"stage {number} of the list, ")
    for symbol, where in stage:
        if symbol == "|":
            raise LayoutError(f"{where}: an entry is one stage, so it has no '|'")
    return stage


def _stages(symbols: list[Symbol]) -> list[list[Symbol]]:
    stages: list[list[Symbol]] = [[]]
    for symbol, where in symbols:
        if symbol == "|":
            stages.append([])
        else:
            stages[-1].append((symbol, where))
    return stages


def _check_ends(stages: list[list[Symbol]]) -> None:
    """E opens the first stage and L closes the last, and neither stands anywhere else."""
    opening, closing = [symbol for symbol, _ in stages[0][:1]], [symbol for symbol, _ in stages[-1][-1:]]
    if opening != ["E"]:
        raise LayoutError("position 1: the first stage must begin with E, the embedding")
    if closing != ["L"]:
        raise LayoutError("the end: the last stage must end with L, the loss")
    placed = [item for stage in stages for item in stage]
    for symbol, where in placed[1:-1]:
        if symbol != "t":
            raise LayoutError(f"{where}: a second {symbol}; {'the embedding' if symbol == 'E' else 'the loss'} is once")


def _expand(text: str, label: str = "") -> list[Symbol]:
    """The symbols with all repeats written out. A repeated symbol keeps the place where it was written."""
    if inside := re.search(r"\d([,\s]+)\d", text):
        raise LayoutError(f"{label}position {inside.start(1) + 1}: a comma or blank inside a number")
    places = [at for at, symbol in enumerate(text) if symbol != "," and not symbol.isspace()]
    bare = "".join(text[at] for at in places)
    out: list[Symbol] = []
    opened: tuple[int, str] | None = None  # where the open group begins in `out` and in the text
    repeatable: int | None = None  # where in `out` the item begins that a `*n` would repeat
    at = 0
    while at < len(bare):
        symbol, where = bare[at], f"{label}position {places[at] + 1}"
        at += 1
        if symbol in "EtL|":
            repeatable = len(out)
            out.append((symbol, where))
        elif symbol == "(" and opened is None:
            opened, repeatable = (len(out), where), None
        elif symbol == ")" and opened is not None and opened[0] < len(out) and bare[at : at + 1] == "*":
            repeatable, opened = opened[0], None
        elif symbol == "*" and repeatable is not None and (digits := re.compile("[0-9]+").match(bare, at)):
            out += out[repeatable:] * (_times(digits[0], len(out) - repeatable, where) - 1)
            at, repeatable = digits.end(), None
        else:
            raise LayoutError(f"{where}: {_complaint(symbol, bare[at : at + 1], opened is not None)}")
    if opened is not None:
        raise LayoutError(f"{opened[1]}: this '(' is never closed")
    return out


def _times(digits: str, length: int, where: str) -> int:
    """The number after a `*`, for an item of `length` symbols."""
    if len(digits) > len(str(LONGEST)) or int(digits) * length > LONGEST:
        raise LayoutError(f"{where}: repeats to more than {LONGEST:,} symbols")
    if int(digits) == 0:
        raise LayoutError(f"{where}: repeats 0 times; leave the symbol out instead")
    return int(digits)


def _complaint(symbol: str, following: str, in_group: bool) -> str:
    """What is wrong with a symbol that could not be read where it stands."""
    if symbol == "m":
        return "'m', multi-token prediction, is not built"
    if symbol == "(":
        return "groups do not nest"
    if symbol == ")" and in_group:
        return "an empty group" if following == "*" else "a group needs a number of repeats, as in (tt|)*3"
    if symbol == ")":
        return "this ')' closes no '('"
    if symbol == "*" and (following.isascii() and following.isdigit()):
        return "nothing stands before this '*' that it could repeat"
    if symbol == "*":
        return "a number must follow '*'"
    return f"{symbol!r} is none of E (embedding), t (transformer layer), L (loss), '|', '*', '(' and ')'"
