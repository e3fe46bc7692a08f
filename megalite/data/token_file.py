"""Reads token files as Megatron-LM writes them: PREFIX.bin holds tokens, PREFIX.idx says where documents start.

PREFIX.idx (little-endian): magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences n, u64 boundaries d; then
i32 lengths [n] in tokens, i64 pointers [n] in bytes, i64 boundaries [d]: document k is made of sequences
boundaries[k] .. boundaries[k + 1] - 1. Multimodal files end with i8 modes [n], which are passed over: an id is an id.
Our documents are one sequence each, unless they have more than 2^31 - 1 tokens; documents of others any number.
PREFIX.json is ours: what is known about the text.
"""

import os
import struct
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.config.files import as_record, read_object, refusing
from megalite.errors.problems import Problem, UserError, several

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: the arrays behind it are not aligned
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no ids
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
ENTRIES = ("<i4", "<i8", "<i8")  # of the index: lengths, pointers, boundaries
ROWS, LOOKS = 1 << 14, 256  # entries of the index that are checked at once, and how often when a file is opened
HASH_WHOLE = 16 << 20  # bytes up to which the identity covers every byte
HASH_BLOCKS, HASH_BLOCK = 64, 64 << 10

Array = npt.NDArray[Any]


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX.bin for `.bin` (a prefix may have dots of its own)."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class Facts:
    """The facts that PREFIX.json may hold about a token file that was made here, or about a shard of one."""

    fingerprint: str | None = None  # of the text and the tokenizer
    tokens: int = 0
    documents: int = 0
    skipped_documents: int = 0  # rows without text
    bytes: int = 0  # of text, in UTF-8
    tokenizer: str | None = None
    vocab_size: int | None = None
    xxh3_128: str | None = None  # of PREFIX.bin


@dataclass(frozen=True)
class TokenFile:
    """One token file, mapped into memory. `tokens` [tokens]; `lengths`, `pointers` [sequences]; `boundaries`
    [documents + 1]. `data`: the file of the tokens."""

    prefix: Path
    facts: Facts
    data: BinaryIO
    tokens: Array
    lengths: Array
    pointers: Array
    boundaries: Array

    @classmethod
    def open(cls, prefix: Path) -> "TokenFile":
        """Open PREFIX.bin and PREFIX.idx; UserError if they are missing, damaged or do not belong together. In a large
        index, some 4 million entries are checked, spread evenly over it."""
        file, data = _mapped(with_suffix(prefix, ".bin"))
        _, index = _mapped(with_suffix(prefix, ".idx"))
        head = index[: HEADER.size].tobytes().ljust(HEADER.size, b"\0")
        magic, version, code, sequences, boundaries = HEADER.unpack(head)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            rule = f"starts with {magic!r}, version {version}, dtype code {code}"
            raise damaged(prefix, ".idx", f"{rule}; must be {MAGIC!r}, version 1 and one of {sorted(DTYPES)}")
        ends = [*accumulate((HEADER.size, 4 * sequences, 8 * sequences, 8 * boundaries))]
        if len(index) not in (ends[-1], ends[-1] + sequences):  # with the modes of a multimodal file
            rule = f"has {len(index):,} bytes; {sequences:,} sequences and {boundaries:,} boundaries need {ends[-1]:,}"
            raise damaged(prefix, ".idx", rule)
        arrays = [index[at:end].view(kind) for (at, end), kind in zip(pairwise(ends), ENTRIES, strict=True)]
        dtype = np.dtype(DTYPES[code])
        tokens = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
        opened = cls(prefix, read_facts(prefix), file, tokens, *arrays)
        opened.check(len(data), step=max(ROWS, -(-max(sequences, boundaries) // LOOKS)))
        return opened

    @property
    def documents(self) -> int:
        return len(self.boundaries) - 1

    @property
    def counts(self) -> str:
        """Documents and tokens, in words."""
        return f"{several(self.documents, 'document')}, {several(len(self.tokens), 'token')}"

    def read(self, first: int, stop: int) -> Array:
        """The tokens [first, stop), not through the map: that would hold the interpreter's lock while a disk is slow,
        and end the process without a word where the file was cut short or the disk fails."""
        found, width = np.empty(stop - first, self.tokens.dtype), self.tokens.dtype.itemsize
        with refusing(self.data.name, "restore it from a copy; a run continues from its newest checkpoint"):
            if os.preadv(self.data.fileno(), [found.view(np.uint8).data], first * width) < found.nbytes:
                raise ValueError("was cut short since it was opened")
        return found

    def document_at(self, position: int) -> int:
        """The document to which the token at `position` belongs."""
        sequence = bisect_right(self.pointers, position * self.tokens.dtype.itemsize) - 1
        return bisect_right(self.boundaries, sequence) - 1

    def document_starts(self, first: int, stop: int) -> list[int]:
        """Positions in (first, stop) at which another document begins (empty documents do not count)."""
        sequences = self.boundaries[self.document_at(first) + 1 : self.document_at(stop - 1) + 1]
        if np.any(sequences[1:] < sequences[:-1]):  # an entry that was not checked when the file was opened
            raise damaged(self.prefix, ".idx", f"a document near token {first:,} ends too early")
        if not len(sequences):
            return []
        starts = self.pointers[int(sequences[0]) : int(sequences[-1]) + 1][sequences - sequences[0]]
        return [int(position) for position in np.unique(starts // self.tokens.dtype.itemsize)]

    def identity(self, vocab_size: int) -> str:
        """A hash of the content: all bytes of a small file, 64 blocks spread over a large one. UserError for the first
        of these tokens that is no id below `vocab_size`: enough to find another tokenizer's."""
        size, width, starts, length = self.tokens.nbytes, self.tokens.dtype.itemsize, [0], self.tokens.nbytes
        if size > HASH_WHOLE:
            starts, length = [(size - HASH_BLOCK) * at // (HASH_BLOCKS - 1) for at in range(HASH_BLOCKS)], HASH_BLOCK
        state = xxhash.xxh3_128(f"{self.tokens.dtype.str},{size},{self.documents}".encode())
        for start, stop in ((start, start + length) for start in starts):
            state.update(self.tokens.view(np.uint8)[start:stop].data)
            self.check_range(start // width, -(-stop // width), vocab_size)
        return state.hexdigest()

    def check_range(self, first: int, stop: int, vocab_size: int, sample: str = "") -> None:
        """UserError for the first of the tokens [first, stop) that is no id below `vocab_size`; `sample` is part of
        the message."""
        tokens = self.tokens[first:stop]
        wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        if len(wrong):
            at = first + int(wrong[0])
            place = f"token {at:,} (document {self.document_at(at):,}{sample})"
            rule = f"token id {self.tokens[at]} at {place} is outside the vocabulary of {vocab_size:,}"
            hint = "model.vocab_size of its tokenizer, or prepare it again; megalite prepare --verify scans it all"
            raise UserError(Problem("data.path", str(with_suffix(self.prefix, ".bin")), rule, hint))

    def check(self, size: int, step: int = 0) -> None:
        """UserError where entries of the index do not fit each other and `size` bytes of data: the ends, and all or,
        with a `step`, ROWS at each step-th entry."""
        count, width = len(self.pointers), self.tokens.dtype.itemsize
        if not count or not size:
            raise damaged(self.prefix, ".bin", f"holds no tokens ({size} bytes, {count} sequences)")
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * width
        if end != size:
            raise damaged(self.prefix, ".bin", f"has {size:,} bytes, {self.prefix.name}.idx describes {end:,}")
        if not len(self.boundaries) or self.boundaries[0] != 0 or self.boundaries[-1] != count:
            rule = f"document boundaries do not run from 0 to {count:,}, the number of sequences"
            raise damaged(self.prefix, ".idx", rule)
        for first in range(0, max(count, len(self.boundaries)), step or ROWS):
            boundaries = self.boundaries[first : first + ROWS + 1]
            for at in np.flatnonzero(boundaries[1:] < boundaries[:-1])[:1]:
                raise damaged(self.prefix, ".idx", f"document {first + at:,} ends before it starts")
            lengths = self.lengths[first : first + ROWS].astype(np.int64)
            starts = np.append(self.pointers[first : first + ROWS + 1], size)[: len(lengths) + 1]
            for at in np.flatnonzero((lengths < 0) | (starts[:-1] + lengths * width != starts[1:]))[:1]:
                rule = f"sequence {first + at:,} starts at byte {starts[at]:,} with {lengths[at]:,} tokens"
                raise damaged(self.prefix, ".idx", f"{rule}, the next at {starts[at + 1]:,}")


def read_facts(prefix: Path) -> Facts:
    """The facts in PREFIX.json; none without the file, which was not made here then."""
    path, hint = with_suffix(prefix, ".json"), "delete it, or prepare the data again"
    return as_record(Facts, read_object(path, hint), path, hint) if os.path.lexists(path) else Facts()


def _mapped(path: Path) -> tuple[BinaryIO, Array]:
    """A regular file and its bytes; a pipe is not waited for."""
    if not os.path.lexists(path):
        hint = "give the path of a token file without .bin; both .bin and .idx are needed"
        raise UserError(Problem("data.path", str(path), "is missing", hint))
    with refusing(path, "check its permissions"):
        if not path.is_file():
            raise ValueError("is not a regular file")
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - open as long as the array is used
        return file, np.asarray(np.memmap(file, np.uint8, "r") if path.stat().st_size else [], np.uint8)


def damaged(prefix: Path, suffix: str, rule: str) -> UserError:
    hint = "copy it again, or delete it and prepare the data again"
    return UserError(Problem("data.path", str(with_suffix(prefix, suffix)), rule, hint))
