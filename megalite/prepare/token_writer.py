"""Writes token files: a stream of documents into one file, and several files into one.

The index is renamed into place last, after everything else is on disk, and a reader refuses data without its index: a
write that was torn at any instant is invisible. Memory holds one length per document of the file being written; joining
files copies their indices in pieces.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.data.atomic import sync_folder, temporary, write_atomically
from megalite.data.token_file import CODES, HEADER, MAGIC, Array, TokenFile, largest_id, with_suffix

LONGEST = 2**31 - 1  # tokens in one sequence: its length is an i32
COPY = 8 << 20  # bytes per copy
ROWS = 1 << 20  # index entries per copy


class TokenWriter:
    """Writes PREFIX.bin and PREFIX.idx: `add` tokens, `end_document`, and at the end `finish`."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any], longest: int = LONGEST) -> None:
        self.prefix, self.dtype, self.longest = prefix, dtype, longest
        self.tokens = 0
        self._open = 0  # tokens of the document that is being written
        self._lengths: list[int] = []
        self._boundaries = [0]
        self._draft = temporary(with_suffix(prefix, ".bin"))
        self._data = self._draft.open("wb")

    @property
    def documents(self) -> int:
        return len(self._boundaries) - 1

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Append tokens [n] to the open document."""
        if self.dtype.kind != "f" and np.any(tokens > largest_id(self.dtype)):  # no assert: python -O would cut the ids
            raise ValueError(f"{self.prefix.name}: token id {tokens.max()} does not fit {self.dtype}")
        self._data.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._open += len(tokens)
        self.tokens += len(tokens)

    def end_document(self) -> None:
        """Close the open document."""
        while self._open > self.longest:
            self._lengths.append(self.longest)
            self._open -= self.longest
        self._lengths.append(self._open)
        self._boundaries.append(len(self._lengths))
        self._open = 0

    def finish(self, facts: dict[str, Any]) -> None:
        """Make the file visible, with `facts` in PREFIX.json."""
        assert self._open == 0, "finish inside a document"
        _sync_and_close(self._data)
        lengths = np.array(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        arrays = [lengths, pointers, np.array(self._boundaries, dtype="<i8")]
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(self._boundaries))
        index = _write_index(self.prefix, header, arrays)
        _commit(self.prefix, self._draft, index, facts)

    def discard(self) -> None:
        """Forget what was written."""
        self._data.close()
        self._draft.unlink(missing_ok=True)


def join(files: Sequence[TokenFile], prefix: Path, facts: dict[str, Any]) -> None:
    """PREFIX holds the documents of all `files` (of one dtype) in order; `facts` and a hash go to PREFIX.json."""
    dtype = files[0].tokens.dtype
    assert all(file.tokens.dtype == dtype for file in files)
    draft, state = temporary(with_suffix(prefix, ".bin")), xxhash.xxh3_128()
    with draft.open("wb") as data:
        for file in files:
            with with_suffix(file.prefix, ".bin").open("rb") as source:
                while block := source.read(COPY):
                    data.write(block)
                    state.update(block)
        _sync(data)
    sequences, documents = sum(len(file.pointers) for file in files), sum(file.documents for file in files)
    header = HEADER.pack(MAGIC, 1, CODES[dtype], sequences, documents + 1)
    index = _write_index(prefix, header, _joined_arrays(files))
    _commit(prefix, draft, index, facts | {"xxh3_128": state.hexdigest()})


def _joined_arrays(files: Sequence[TokenFile]) -> Iterable[npt.NDArray[Any]]:
    """Lengths, pointers and boundaries of all files behind each other, piece by piece."""
    for file in files:
        yield from _pieces(file.lengths)
    byte = 0
    for file in files:
        yield from (piece + byte for piece in _pieces(file.pointers))
        byte += file.tokens.nbytes
    yield np.zeros(1, dtype="<i8")
    sequence = 0
    for file in files:
        yield from (piece + sequence for piece in _pieces(file.boundaries, 1))
        sequence += len(file.pointers)


def _pieces(array: Array, first: int = 0) -> Iterable[npt.NDArray[Any]]:
    return (array[start : start + ROWS] for start in range(first, len(array), ROWS))


def _write_index(prefix: Path, header: bytes, arrays: Iterable[npt.NDArray[Any]]) -> Path:
    draft = temporary(with_suffix(prefix, ".idx"))
    with draft.open("wb") as file:
        file.write(header)
        for array in arrays:
            file.write(array.tobytes())
        _sync(file)
    return draft


def _commit(prefix: Path, data: Path, index: Path, facts: dict[str, Any]) -> None:
    """Old index away, then data and facts, and the new index last: at no instant does an index face foreign data."""
    with_suffix(prefix, ".idx").unlink(missing_ok=True)
    data.replace(with_suffix(prefix, ".bin"))
    write_atomically(with_suffix(prefix, ".json"), json.dumps(facts, indent=1).encode())
    index.replace(with_suffix(prefix, ".idx"))
    sync_folder(prefix.parent)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_and_close(file: IO[bytes]) -> None:
    _sync(file)
    file.close()
