"""Tokenizing one shard, and the process that does so for others: `python -m megalite.data.worker`.

Jobs come in as lines of JSON, progress and results go out as lines of JSON. A worker that loses its parent finds its
pipe closed at the next line and ends. It imports no torch. A shard's result is a token file, visible when whole.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.problems import UserError
from megalite.data.reading import PIECE, Piece, Shard, pieces
from megalite.data.token_file import dtype_for
from megalite.data.token_writer import TokenWriter
from megalite.data.tokenizers import TextTokenizer, load_tokenizer

BATCH = 4 * PIECE  # characters that are tokenized in one call
Report = Callable[[int, int, int], None]  # bytes of the shard's size, documents and tokens so far


def tokenize_shard(shard: Shard, tokenizer: TextTokenizer, target: Path, batch: int, report: Report) -> None:
    """Write the token file `target` of one shard, `batch` characters at a time."""
    writer = TokenWriter(target, dtype_for(tokenizer.vocab_size))
    done = Tally(writer, tokenizer.end_of_document)
    gathered: list[Piece] = []
    held = 0
    try:
        for piece in pieces(shard):
            gathered.append(piece)
            held += len(piece.text or "")
            if held >= batch or len(gathered) >= 4096:
                done.add(gathered, tokenizer)
                gathered, held = [], 0
                report(done.bytes, writer.documents, writer.tokens)
        done.add(gathered, tokenizer)
        writer.finish({"bytes": done.bytes, "skipped": done.skipped})
    except BaseException:
        writer.discard()
        raise
    report(max(done.bytes, shard.size), writer.documents, writer.tokens)  # what is not text is done with, too


class Tally:
    """Feeds tokenized pieces to a writer and counts what they were made of."""

    def __init__(self, writer: TokenWriter, end_of_document: int | None) -> None:
        self.writer = writer
        self.end = None if end_of_document is None else np.array([end_of_document])
        self.bytes = 0  # of text, in UTF-8
        self.skipped = 0  # rows without text
        self._inside = False  # the document has begun

    def add(self, gathered: list[Piece], tokenizer: TextTokenizer) -> None:
        """Tokenize and write pieces, in order."""
        encoded = iter(tokenizer.encode_many([piece.text for piece in gathered if piece.text]))
        for piece in gathered:
            if piece.text:
                self.writer.add(next(encoded))
                self.bytes += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
                self._inside = True
            if not piece.ends_document:
                continue
            if self._inside:
                if self.end is not None:
                    self.writer.add(self.end)
                self.writer.end_document()
            else:
                self.skipped += 1
            self._inside = False


def job_line(shard: Shard, target: Path) -> str:
    """A job as the worker reads it."""
    return json.dumps({"shard": asdict(shard), "target": str(target)}) + "\n"


def serve(tokenizer_folder: str) -> None:
    """Do jobs from stdin until it ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)  # our own: what a library prints must not mix with replies
    os.dup2(2, 1)

    def reply(**facts: Any) -> None:
        replies.write(json.dumps(facts) + "\n")

    tokenizer: TextTokenizer | None = None
    for line in sys.stdin:
        try:
            job = json.loads(line)
            shard = Shard(**{**job["shard"], "paths": tuple(job["shard"]["paths"])})
            tokenizer = tokenizer or load_tokenizer(Path(tokenizer_folder))
            tokenize_shard(shard, tokenizer, Path(job["target"]), PIECE, lambda *counts: reply(progress=counts))
            reply(done=True)
        except UserError as error:
            reply(problems=[asdict(problem) for problem in error.problems])
        except BrokenPipeError:
            raise
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            reply(error=traceback.format_exc(), errno=number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    try:
        serve(sys.argv[1])
    except BrokenPipeError:
        os._exit(1)  # the parent is gone, and with it whoever would read a message
