"""The layout of a pipeline's stages as text, in Megatron-LM's form, read into layers per stage and written from them.

`E` embedding, `t` one transformer layer, `L` loss, `|` the border of two stages; `*n` repeats the symbol or the
parenthesised group before it; commas and blanks mean nothing. `Et*3|(tt|)*2,L` is 3, 2, 2 and 0 layers. E opens the
first stage and L closes the last, so the layers per stage say everything.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

LONGEST = 100_000  # symbols after repetition: more is a slip of the pen, and would only fill the memory
SYMBOL, GROUP = (re.compile(item + r"\*([1-9][0-9]{0,5})") for item in ("([EtL|])", r"\(([EtL|]+)\)"))


def layout_counts(layout: str) -> tuple[int, ...]:
    """Layers of every stage, in stage order. Raises ValueError for a text that is no layout."""
    numbers_are_whole = not re.search(r"[0-9][,\s]+[0-9]", layout)
    text = re.sub(r"[,\s]", "", layout)
    if "m" in text:
        raise ValueError("'m', multi-token prediction, is not built")
    for item in (SYMBOL, GROUP):
        if sum(len(repeated) * int(times) for repeated, times in item.findall(text)) > LONGEST:
            raise ValueError(f"repeats to more than {LONGEST:,} symbols")
        text = item.sub(lambda found: found[1] * int(found[2]), text)
    if not (numbers_are_whole and re.fullmatch(r"E[t|]*L", text)):
        raise ValueError("must be stages like 'Ett|t*4|(tt|)*2tL': E, the embedding, first, L, the loss, last")
    return tuple(stage.count("t") for stage in text.split("|"))


def layout_text(counts: Sequence[int]) -> str:
    """The text form of so many layers on each stage."""

    def layers(count: int) -> str:
        return "t" * count if count < 3 else f"t*{count}"

    def run(count: int, stages: Iterable[int]) -> str:
        times = len(list(stages))
        return f"{layers(count)}|" if times == 1 else f"({layers(count)}|)*{times}"

    return f"E{''.join(run(*each) for each in groupby(counts[:-1]))}{layers(counts[-1])}L"
