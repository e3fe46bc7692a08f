"""Writes token files: a stream of documents into one file, and several files into one.

The index comes last, after everything else is on disk, and a reader refuses data without its index: a write that was
torn at any instant is invisible. Memory holds some 30 bytes for each document of the file being written.
"""

import json
import os
from array import array
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.config.durable_files import write_atomically
from megalite.data.token_file import CODES, HEADER, MAGIC, TokenFile, with_suffix

LONGEST = 2**31 - 1  # tokens in one sequence: its length is an i32
COPY = 8 << 20  # tokens per copy


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Writes a new PREFIX.bin and PREFIX.idx: `add` tokens, `end_document`, and at the end `finish`. In a `with`, it
    leaves nothing of a file that an error has ended."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any], longest: int = LONGEST) -> None:
        self.prefix, self.dtype, self.longest = prefix, dtype, longest
        self.tokens = 0
        self._open = 0  # tokens of the document that is being written
        self._lengths, self._boundaries = array("i"), array("q", [0])
        with_suffix(prefix, ".idx").unlink(missing_ok=True)
        self._data = with_suffix(prefix, ".bin").open("wb")
        self.hash = xxhash.xxh3_128()

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            with_suffix(self.prefix, ".bin").unlink(missing_ok=True)
            self._data.close()

    @property
    def documents(self) -> int:
        return len(self._boundaries) - 1

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Append tokens [n] to the open document."""
        if np.any(tokens > np.iinfo(self.dtype).max):  # no assert: python -O would cut the ids
            raise ValueError(f"{self.prefix.name}: token id {tokens.max()} does not fit {self.dtype}")
        self._write(tokens.astype(self.dtype, copy=False))
        self._open += len(tokens)

    def end_document(self) -> None:
        """Close the open document."""
        while self._open > self.longest:
            self._lengths.append(self.longest)
            self._open -= self.longest
        self._lengths.append(self._open)
        self._boundaries.append(len(self._lengths))
        self._open = 0

    def append(self, file: TokenFile) -> None:
        """All documents of a file of the same dtype."""
        assert file.tokens.dtype == self.dtype, (file.tokens.dtype, self.dtype)
        for start in range(0, len(file.tokens), COPY):
            self._write(file.tokens[start : start + COPY])
        self._boundaries.frombytes((file.boundaries[1:] + len(self._lengths)).tobytes())
        self._lengths.frombytes(file.lengths.tobytes())

    def finish(self, facts: dict[str, Any]) -> None:
        """Make the file visible, with `facts` in PREFIX.json."""
        assert self._open == 0, "finish inside a document"
        lengths, pointers = np.array(self._lengths, dtype="<i4"), np.zeros(len(self._lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(self._boundaries))
        with self._data:
            self._data.flush()
            os.fsync(self._data.fileno())
        write_atomically(with_suffix(self.prefix, ".json"), json.dumps(facts, indent=1).encode())
        parts = (lengths, pointers, np.array(self._boundaries, dtype="<i8"))
        write_atomically(with_suffix(self.prefix, ".idx"), b"".join([header, *(part.tobytes() for part in parts)]))

    def _write(self, tokens: npt.NDArray[Any]) -> None:
        self.hash.update(tokens.data)
        self._data.write(tokens.data)
        self.tokens += len(tokens)


def join(files: Iterable[TokenFile], prefix: Path, dtype: np.dtype[Any], facts: dict[str, Any]) -> None:
    """PREFIX holds the documents of all `files` (of this dtype) in order; `facts` and a hash go to PREFIX.json. `files`
    may open each file when it is asked for: none is kept."""
    with TokenWriter(prefix, dtype) as writer:
        for file in files:
            writer.append(file)
        writer.finish(facts | {"xxh3_128": writer.hash.hexdigest()})
