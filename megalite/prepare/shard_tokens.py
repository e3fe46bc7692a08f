"""Tokenizes one shard of the text into a token file of its own, which is visible only when it is whole."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from megalite.data.token_file import dtype_for
from megalite.data.tokenizers import TextTokenizer
from megalite.prepare.reading import Piece, Shard, pieces
from megalite.prepare.token_writer import TokenWriter

MOST_PIECES = 4096  # that are tokenized in one call

Report = Callable[[int, int, int], None]  # bytes of the shard's size, documents and tokens so far


def tokenize_shard(shard: Shard, tokenizer: TextTokenizer, target: Path, batch: int, report: Report) -> None:
    """Write the token file `target` of one shard, `batch` characters at a time."""
    writer = TokenWriter(target, dtype_for(tokenizer.vocab_size))
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    size = skipped = 0  # bytes of text, in UTF-8; rows without text
    begun = False  # the document has text
    try:
        for gathered in _batches(pieces(shard), batch):
            encoded = iter(tokenizer.encode_many([piece.text for piece in gathered if piece.text]))
            for piece in gathered:
                if piece.text:
                    writer.add(next(encoded))
                    size += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
                    begun = True
                if piece.ends_document and begun:
                    writer.add(end)
                    writer.end_document()
                skipped += piece.ends_document and not begun
                begun = begun and not piece.ends_document
            report(size, writer.documents, writer.tokens)
        writer.finish({"bytes": size, "skipped_documents": skipped})
    except BaseException:
        writer.discard()
        raise
    report(max(size, shard.size), writer.documents, writer.tokens)  # what is not text is done with, too


def _batches(found: Iterable[Piece], characters: int) -> Iterator[list[Piece]]:
    """The pieces, gathered until they have so many characters."""
    gathered: list[Piece] = []
    held = 0
    for piece in found:
        gathered.append(piece)
        held += len(piece.text or "")
        if held >= characters or len(gathered) >= MOST_PIECES:
            yield gathered
            gathered, held = [], 0
    yield gathered
