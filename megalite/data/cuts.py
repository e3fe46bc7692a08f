"""Where a long document can be cut in two so that its parts, encoded one after the other, have the ids of the whole.

A `Cut` is given a text and a place, and answers with a place at or behind that one, or 0 for none. What stands before a
place is given to the tokenizer together with what follows, and its tokens are left out again: so a space that the
tokenizer puts before every text is put before the document alone.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from megalite.data.samples import IntArray

Cut = Callable[[str, int], int]
Encode = Callable[[Sequence[str]], list[IntArray]]
Words = Callable[[str], list[tuple[str, tuple[int, int]]]]  # of a text with the places where they begin and end
PIECE = 1 << 20  # characters after which a document is cut
CONTEXT = 256  # characters that are given to the tokenizer again
STARTS, ENDS = (0, 1, 5, 13), (0, 9)  # by so much less context is looked at, too
WIDE = 1 << 14  # characters on each side in which a place must not matter
TRIED = 32  # places
LONG = 128  # characters of a word near a place where words may be found by a pattern that looks far
BEHIND_A_WORD = re.compile(r"(?<=[^\W_])\s")


def at_line_end(text: str, start: int) -> int:
    """A place in front of a line end that follows a letter or digit: there GPT-2's byte-level BPE begins a word."""
    while (at := text.find("\n", start)) != -1:
        at -= text[at - 1 : at] == "\r"
        if at and text[at - 1].isalnum():
            return at
        start = at + 2
    return 0


def nowhere(text: str, start: int) -> int:
    """No place: the document is encoded whole."""
    return 0


def where_encodings_agree(encode: Encode, words: Words | None) -> Cut:
    """Places behind a word where the tokens do not depend on where one begins and ends to read, near and far away, and
    where `words`, if it is given, finds short ones."""

    def cut(text: str, start: int) -> int:
        places = BEHIND_A_WORD.finditer(text, max(start, WIDE), max(0, len(text) - WIDE))
        for _, place in zip(range(TRIED), places, strict=False):
            at = place.start()
            near = [] if words is None else words(text[at - CONTEXT : at + CONTEXT])
            if all(stop - begin <= LONG for _, (begin, stop) in near) and _agree(encode, text, at):
                return at
        return 0

    return cut


def _agree(encode: Encode, text: str, at: int) -> bool:
    """Whether the tokens before a place are the same with what follows, and those behind it whatever stands before."""
    near = [(CONTEXT - less, CONTEXT - left_out) for left_out in ENDS for less in STARTS]
    for spans in (near, [(WIDE, WIDE), (CONTEXT, WIDE)]):
        heads = encode([text[at - left : at] for left, _ in spans])
        both = encode([text[at - left : at + right] for left, right in spans])
        behind = [ids[len(head) :] for head, ids in zip(heads, both, strict=True)]
        if not all(np.array_equal(ids[: len(head)], head) for head, ids in zip(heads, both, strict=True)):
            return False
        same = len(spans) // len({right for _, right in spans})  # neighbours that end at one place
        if not all(np.array_equal(behind[number], behind[number - number % same]) for number in range(len(behind))):
            return False
    return True
