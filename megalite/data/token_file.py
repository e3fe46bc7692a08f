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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from megalite.config.user_files import as_record, read_object, refusing
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: the arrays behind it are not aligned
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no ids
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
ROWS, LOOKS = 1 << 14, 256  # entries of the index that are checked at once, and how often when a file is opened
SCANNED = 1 << 24  # tokens at once
HASH_WHOLE = 16 << 20  # bytes up to which the identity covers every byte
HASH_BLOCKS, HASH_BLOCK = 64, 64 << 10


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Megatron's choice: 16 bits where every id fits with room to spare."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX.bin for `.bin` (a prefix may have dots of its own)."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class DiskArray:
    """`count` numbers from byte `offset` of an open file on; a slice of them is read and given as a numpy array.

    Not a memory map: where a page of a map is gone (the file was cut short, its disk or network fails) the system ends
    the process without a word. A read that comes up short is a refusal that names the file.
    """

    file: BinaryIO
    dtype: np.dtype[Any]
    offset: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int | slice) -> Any:
        if not isinstance(place, slice):
            at = range(self.count)[place]
            return self[at : at + 1][0]
        start, stop, _ = place.indices(self.count)
        content = np.empty(max(0, stop - start), self.dtype)
        with refusing(self.file.name, "restore it from a copy; a run continues from its newest checkpoint"):
            begin = self.offset + start * self.dtype.itemsize
            if os.preadv(self.file.fileno(), [content.view(np.uint8).data], begin) < content.nbytes:
                raise ValueError("was cut short since it was opened")
        return content


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
    """One token file. `tokens` [tokens]; `lengths`, `pointers` [sequences]; `boundaries` [documents + 1]."""

    prefix: Path
    tokens: DiskArray
    lengths: DiskArray
    pointers: DiskArray
    boundaries: DiskArray

    @classmethod
    def open(cls, prefix: Path) -> "TokenFile":
        """Open PREFIX.bin and PREFIX.idx; UserError if they are missing, damaged or do not belong together.

        In a large index, some 4 million entries are checked, spread evenly over it.
        """
        data, index = _opened(with_suffix(prefix, ".bin")), _opened(with_suffix(prefix, ".idx"))
        size, given = (os.fstat(file.fileno()).st_size for file in (data, index))
        head = DiskArray(index, np.dtype("u1"), 0, min(HEADER.size, given))[:].tobytes().ljust(HEADER.size, b"\0")
        magic, version, code, sequences, boundaries = HEADER.unpack(head)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            rule = f"starts with {magic!r}, version {version}, dtype code {code}"
            raise _damaged(prefix, ".idx", f"{rule}; must be {MAGIC!r}, version 1 and one of {sorted(DTYPES)}")
        dtype, at = np.dtype(DTYPES[code]), HEADER.size
        end = at + 12 * sequences + 8 * boundaries
        if given not in (end, end + sequences):  # with the modes of a multimodal file
            rule = f"has {given:,} bytes; {sequences:,} sequences and {boundaries:,} boundaries need {end:,}"
            raise _damaged(prefix, ".idx", rule)
        file = cls(
            prefix=prefix,
            tokens=DiskArray(data, dtype, 0, size // dtype.itemsize),
            lengths=DiskArray(index, np.dtype("<i4"), at, sequences),
            pointers=DiskArray(index, np.dtype("<i8"), at + 4 * sequences, sequences),
            boundaries=DiskArray(index, np.dtype("<i8"), at + 12 * sequences, boundaries),
        )
        file.check(size, step=max(ROWS, -(-max(sequences, boundaries) // LOOKS)))
        return file

    @property
    def documents(self) -> int:
        return len(self.boundaries) - 1

    @property
    def counts(self) -> str:
        """Documents and tokens, in words."""
        return f"{several(self.documents, 'document')}, {several(len(self.tokens), 'token')}"

    @cached_property
    def facts(self) -> Facts:
        """The facts in PREFIX.json; none for a file that was not made here."""
        return read_facts(self.prefix)

    def document_at(self, position: int) -> int:
        """The document to which the token at `position` belongs."""
        sequence = bisect_right(self.pointers, position * self.tokens.dtype.itemsize) - 1
        return bisect_right(self.boundaries, sequence) - 1

    def document_starts(self, first: int, stop: int) -> list[int]:
        """Positions in (first, stop) at which another document begins (empty documents do not count)."""
        sequences = self.boundaries[self.document_at(first) + 1 : self.document_at(stop - 1) + 1]
        if np.any(sequences[1:] < sequences[:-1]):  # an entry that was not checked when the file was opened
            raise _damaged(self.prefix, ".idx", f"a document near token {first:,} ends too early")
        if not len(sequences):
            return []
        starts = self.pointers[int(sequences[0]) : int(sequences[-1]) + 1][sequences - sequences[0]]
        return [int(position) for position in np.unique(starts // self.tokens.dtype.itemsize)]

    def identity(self) -> str:
        """A hash of the content: all bytes of a small file, 64 blocks spread over a large one."""
        state = xxhash.xxh3_128(f"{self.tokens.dtype.str},{self.tokens.nbytes},{self.documents}".encode())
        content = replace(self.tokens, dtype=np.dtype("u1"), count=self.tokens.nbytes)
        for start, length in self._blocks():
            state.update(content[start : start + length].data)
        return state.hexdigest()

    def check_ids(self, vocab_size: int) -> None:
        """UserError for the first token that is no id below `vocab_size`, among the tokens that the identity covers:
        enough to find another tokenizer's."""
        width = self.tokens.dtype.itemsize
        for start, length in self._blocks():
            self.check_range(start // width, -(-(start + length) // width), vocab_size)

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

    def check(self, size: int, step: int) -> None:
        """UserError where the ends of the index, or ROWS entries at each `step`-th one, do not fit each other and
        `size` bytes of data."""
        count, width = len(self.pointers), self.tokens.dtype.itemsize
        if not count or not size:
            raise _damaged(self.prefix, ".bin", f"holds no tokens ({size} bytes, {count} sequences)")
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * width
        if end != size:
            raise _damaged(self.prefix, ".bin", f"has {size:,} bytes, {self.prefix.name}.idx describes {end:,}")
        if not len(self.boundaries) or self.boundaries[0] != 0 or self.boundaries[-1] != count:
            rule = f"document boundaries do not run from 0 to {count:,}, the number of sequences"
            raise _damaged(self.prefix, ".idx", rule)
        for first in range(0, max(count, len(self.boundaries)), step):
            boundaries = self.boundaries[first : first + ROWS + 1]
            for at in np.flatnonzero(boundaries[1:] < boundaries[:-1])[:1]:
                raise _damaged(self.prefix, ".idx", f"document {first + at:,} ends before it starts")
            lengths = self.lengths[first : first + ROWS].astype(np.int64)
            starts = np.append(self.pointers[first : first + ROWS + 1], size)[: len(lengths) + 1]
            for at in np.flatnonzero((lengths < 0) | (starts[:-1] + lengths * width != starts[1:]))[:1]:
                rule = f"sequence {first + at:,} starts at byte {starts[at]:,} with {lengths[at]:,} tokens"
                raise _damaged(self.prefix, ".idx", f"{rule}, the next at {starts[at + 1]:,}")

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """First byte and number of bytes of the parts that stand for the content."""
        size = self.tokens.nbytes
        if size <= HASH_WHOLE:
            yield 0, size
        else:
            yield from (((size - HASH_BLOCK) * block // (HASH_BLOCKS - 1), HASH_BLOCK) for block in range(HASH_BLOCKS))


def verify(prefix: Path, vocab_size: int | None, progress: Callable[..., None] | None = None) -> TokenFile:
    """The file, if every index entry and every token id of it is sound; else UserError naming the first broken sequence
    or document. Without `vocab_size`, that of PREFIX.json holds. `progress`: see open.py."""
    file = TokenFile.open(prefix)
    size = vocab_size if vocab_size is not None else file.facts.vocab_size
    if size is None:
        rule = "the vocabulary size is neither given nor in a file of ours"
        raise UserError(Problem("model.vocab_size", None, rule, "model.vocab_size=N"))
    file.check(file.tokens.nbytes, step=ROWS)
    total, width, state = len(file.tokens), file.tokens.dtype.itemsize, xxhash.xxh3_128()
    for start in range(0, total, SCANNED):
        stop = min(start + SCANNED, total)
        state.update(file.tokens[start:stop].data)
        file.check_range(start, stop, size)
        if progress:
            progress(stop * width, total * width, file.document_at(stop - 1) + 1, stop)
    if file.facts.xxh3_128 not in (None, state.hexdigest()):
        raise _damaged(prefix, ".bin", f"its content is not what was prepared (by its hash in {prefix.name}.json)")
    return file


def read_facts(prefix: Path) -> Facts:
    """The facts in PREFIX.json; none without the file."""
    path, hint = with_suffix(prefix, ".json"), "delete it, or prepare the data again"
    return as_record(Facts, read_object(path, hint), path, hint) if os.path.lexists(path) else Facts()


def _opened(path: Path) -> BinaryIO:
    """A regular file, open for reading; a pipe is not waited for."""
    if not os.path.lexists(path):
        hint = "give the path of a token file without .bin; both .bin and .idx are needed"
        raise UserError(Problem("data.path", str(path), "is missing", hint))
    with refusing(path, "check its permissions"):
        if not path.is_file():
            raise ValueError("is not a regular file")
        return path.open("rb", buffering=0)


def _damaged(prefix: Path, suffix: str, rule: str) -> UserError:
    hint = "copy it again, or delete it and prepare the data again"
    return UserError(Problem("data.path", str(with_suffix(prefix, suffix)), rule, hint))
