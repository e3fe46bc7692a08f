"""Where a long document can be cut so that its pieces, encoded one after the other, have the ids of the whole.

A `Cut` takes a text and a place, and gives the next place from there on, or 0 for none. The end of the text before a
place is encoded together with what follows, and its tokens are left out again: so a space that the tokenizer puts
before every text is put before the document alone.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from megalite.data.tokenizers import TextTokenizer

Cut = Callable[[str, int], int]
PIECE = 1 << 20  # characters after which a document is cut
CONTEXT = 256  # characters that are given to the tokenizer again
WIDE = 1 << 13  # characters on each side in which a place must not matter
NEAR = (CONTEXT, CONTEXT - 1, CONTEXT - 5, CONTEXT - 13)  # characters before a place
TRIED = 32  # places
LONG = 128  # characters of a word near a place where words may be found by a pattern that looks far
BEHIND_A_WORD, BEHIND_A_SIGN = re.compile(r"(?<=[^\W_])\s"), re.compile(r"(?<=[^\w\s])\s")


class Piece(NamedTuple):
    """A part of a document. A row without text is a piece without text."""

    document: int  # its number in the shard
    before: str  # the end of the text before this part
    text: str
    last: bool  # the document ends here


def in_pieces(blocks: Iterable[str], cut: Cut, document: int) -> Iterator[Piece]:
    """The document that the blocks are together, in pieces of about PIECE characters."""
    buffer, before, sought = "", "", PIECE  # where to seek the next place: those before are no places
    for block in blocks:
        buffer, start = buffer + block, 0
        while len(buffer) > sought and (stop := cut(buffer, sought)):
            yield Piece(document, before, buffer[start:stop], False)
            before, start, sought = buffer[stop - CONTEXT : stop], stop, stop + PIECE
        sought = max(sought, len(buffer) - 2 * WIDE) - start
        buffer = buffer[start:]
    yield Piece(document, before, buffer, True)


def behind_a_word(text: str, start: int) -> int:
    """A place between a letter or digit, or else a sign, and a blank."""
    found = BEHIND_A_WORD.search(text, start) or BEHIND_A_SIGN.search(text, start)
    return found.start() if found else 0


def cut_for(tokenizer: TextTokenizer) -> Cut:
    """Places behind a word, or else behind a sign, where the tokens do not depend on where a text begins and ends, near
    and far away, and where words are short if the tokenizer finds them by a pattern."""
    steps = tokenizer.backend.pre_tokenizer
    # A Unigram model adds up scores over all of a word: ties in a long word are decided by rounding. No place is sure.
    if tokenizer.spec["model"]["type"] == "Unigram" and (steps is None or len(steps.pre_tokenize_str("a b")) < 2):
        return lambda text, start: 0
    far = any(tokenizer.mentions(kind, "pre_tokenizer") for kind in ("Split", "FixedLength"))

    def cut(text: str, start: int) -> int:
        kinds = (BEHIND_A_WORD, BEHIND_A_SIGN)  # lines of some languages end on signs alone
        places = (each.finditer(text, max(start, WIDE), max(0, len(text) - WIDE)) for each in kinds)
        for at in (place.start() for place in islice(chain.from_iterable(places), TRIED)):
            near = steps.pre_tokenize_str(text[at - CONTEXT : at + CONTEXT]) if far else []
            if all(stop - begin <= LONG for _, (begin, stop) in near) and _agree(tokenizer, text, at):
                return at
        return 0

    return cut


def _agree(tokenizer: TextTokenizer, text: str, at: int) -> bool:
    """Whether the tokens before a place are the same with what follows, and those behind it whatever stands before."""
    for right, lefts in ((CONTEXT, NEAR), (CONTEXT - 9, NEAR), (WIDE, (CONTEXT, WIDE))):
        heads = tokenizer.encode_many([text[at - left : at] for left in lefts])
        both = tokenizer.encode_many([text[at - left : at + right] for left in lefts])
        behind = [ids[len(head) :] for head, ids in zip(heads, both, strict=True)]
        if not all(np.array_equal(ids[: len(head)], head) for head, ids in zip(heads, both, strict=True)):
            return False
        if not all(np.array_equal(ids, behind[0]) for ids in behind):
            return False
    return True
