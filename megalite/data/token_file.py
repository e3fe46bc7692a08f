"""Reads token files as Megatron-LM writes them: PREFIX.bin holds tokens, PREFIX.idx says where documents start.

PREFIX.idx (little-endian): magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences n, u64 boundaries d; then
i32 lengths [n] in tokens, i64 pointers [n] in bytes, i64 boundaries [d]: document k is made of sequences
boundaries[k] .. boundaries[k + 1] - 1. Behind them, multimodal files have i8 modes [n], which are passed over: an id is
an id. Our documents are one sequence each, unless they have more than 2^31 - 1 tokens; those of others any number.
Reading takes from both files only what is asked for. PREFIX.json is ours: what is known about the text.
"""

import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.config.user_files import as_record, read_object, refusing
from megalite.data.permutation import IntArray
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: the arrays behind it are not aligned
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
AGAIN = "restore it from a copy; a run continues from its newest checkpoint"
SAMPLED_CHECKS, SAMPLED_ROWS = 16, 64  # places of the index that are checked when a file is opened; entries of each
BLOCK = 64  # documents whose starts are read at once in a search
ROWS, SCANNED = 1 << 14, 1 << 24  # index entries and tokens at once
HASH_WHOLE = 16 << 20  # bytes up to which the identity covers every byte
HASH_BLOCKS, HASH_BLOCK = 64, 64 << 10


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Megatron's choice: 16 bits where every id fits with room to spare."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def largest_id(dtype: np.dtype[Any]) -> int:
    """The largest id up to which all can be stored; floats skip whole numbers beyond."""
    return 2 ** (np.finfo(dtype).nmant + 1) if dtype.kind == "f" else int(np.iinfo(dtype).max)


def ids_of(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Stored tokens [n] as whole numbers [n]; -1, which no vocabulary has, for a float that is not whole."""
    if tokens.dtype.kind != "f":
        return tokens
    whole = (tokens == np.floor(tokens)) & (np.abs(tokens) < 2**63)
    return np.where(whole, tokens, -1).astype(np.int64)


def places_beyond(tokens: npt.NDArray[Any], vocab_size: int) -> npt.NDArray[Any]:
    """Places of the stored tokens [n] that are no id below `vocab_size`."""
    ids = ids_of(tokens)
    return np.flatnonzero((ids < 0) | (ids >= vocab_size))


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX.bin for `.bin` (a prefix may have dots of its own)."""
    return prefix.with_name(prefix.name + suffix)


class OpenedFile:
    """A regular file, open for reading as long as this object lives; its size is that of the opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with refusing(path, "check its permissions"):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.descriptor)
            state = os.fstat(self.descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ValueError("is not a regular file")
        self.size = state.st_size


@dataclass(frozen=True)
class DiskArray:
    """`count` numbers from byte `offset` of a file on; a slice of them is read and given as a numpy array.

    Not a memory map: where a page of a map is gone (the file was cut short, its disk fails) the system ends the process
    without a word. A read that comes up short is a refusal that names the file.
    """

    file: OpenedFile
    dtype: np.dtype[Any]
    offset: int
    count: int

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int | slice) -> Any:
        if not isinstance(place, slice):
            at = range(self.count)[place]
            return self[at : at + 1][0]
        start, stop, step = place.indices(self.count)
        assert step == 1, place
        content = np.empty(max(0, stop - start), self.dtype)
        self._read(self.offset + start * self.itemsize, content.view(np.uint8))
        return content

    def _read(self, start: int, content: npt.NDArray[np.uint8]) -> None:
        """Fill `content` with the bytes of the file from `start` on; the system may give them in several reads."""
        with refusing(self.file.path, AGAIN):
            while len(content):
                count = os.preadv(self.file.descriptor, [content.data], start)
                if count == 0:
                    size = os.fstat(self.file.descriptor).st_size
                    now = f"has {size:,} bytes now, {self.file.size:,} when it was opened"
                    raise ValueError(f"{now}: it was cut short since")
                start, content = start + count, content[count:]


Array = npt.NDArray[Any] | DiskArray


@dataclass(frozen=True)
class Facts:
    """The facts that PREFIX.json may tell of a token file that was made here, or of a shard of one."""

    fingerprint: str | None = None  # of the text and the tokenizer
    tokens: int = 0
    documents: int = 0
    skipped_documents: int = 0  # rows without text
    bytes: int = 0  # of text, in UTF-8
    tokenizer: str | None = None
    vocab_size: int | None = None
    xxh3_128: str | None = None  # of PREFIX.bin
    remarks: list[str] = field(default_factory=list)  # on what the tokenizer made of the text


@dataclass(frozen=True)
class TokenFile:
    """One token file. `tokens` [tokens]; `lengths`, `pointers` [sequences]; `boundaries` [documents + 1]."""

    prefix: Path
    tokens: Array
    lengths: Array
    pointers: Array
    boundaries: Array
    _starts: dict[int, int] = field(default_factory=dict)  # of the documents in whose middle a search was halved

    @classmethod
    def open(cls, prefix: Path) -> "TokenFile":
        """Open PREFIX.bin and PREFIX.idx; UserError if they are missing, damaged or do not belong together."""
        index, data = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
        for path in (data, index):
            if not os.path.lexists(path):
                remedy = "give the path of a token file without .bin; both .bin and .idx are needed"
                raise UserError(Problem("data.path", str(path), "is missing", remedy))
        content, entries = OpenedFile(data), OpenedFile(index)
        head = DiskArray(entries, np.dtype(np.uint8), 0, min(HEADER.size, entries.size))[:].tobytes()
        magic, version, code, sequences, boundaries = HEADER.unpack(head.ljust(HEADER.size, b"\0"))
        if magic != MAGIC or version != 1 or code not in DTYPES:
            rule = f"has {entries.size:,} bytes and starts with {magic!r}, version {version}, dtype code {code}"
            known = f"an index starts with {MAGIC!r}, version 1 and a dtype code of {sorted(DTYPES)}"
            raise UserError(_damaged(index, f"{rule}; {known}"))
        dtype, long, at = np.dtype(DTYPES[code]), np.dtype("<i8"), HEADER.size
        end = at + 12 * sequences + 8 * boundaries
        if entries.size not in (end, end + sequences):  # with the modes of a multimodal file
            rule = f"has {entries.size:,} bytes; {sequences:,} sequences and {boundaries:,} boundaries need {end:,}"
            raise UserError(_damaged(index, rule))
        file = cls(
            prefix=prefix,
            tokens=DiskArray(content, dtype, 0, content.size // dtype.itemsize),
            lengths=DiskArray(entries, np.dtype("<i4"), at, sequences),
            pointers=DiskArray(entries, long, at + 4 * sequences, sequences),
            boundaries=DiskArray(entries, long, at + 12 * sequences, boundaries),
        )
        if problem := next(file._problems(content.size), None):
            raise UserError(problem)
        return file

    @property
    def documents(self) -> int:
        return len(self.boundaries) - 1

    @property
    def counts(self) -> str:
        """Documents and tokens, in words."""
        return f"{several(self.documents, 'document')}, {several(len(self.tokens), 'token')}"

    def starts(self, first: int, stop: int) -> IntArray:
        """Positions of the first tokens of the documents [first, stop); number `documents` is the end of the file."""
        if first >= stop:
            return np.empty(0, np.int64)
        sequences = self.boundaries[first:stop]
        low, high = int(sequences[0]), int(sequences[-1])
        pointers = self.pointers[low : high + 1].astype(np.int64)
        pointers = np.append(pointers, self.tokens.nbytes) if high == len(self.pointers) else pointers
        return np.asarray(pointers[sequences - low] // self.tokens.itemsize)

    def document_at(self, position: int) -> int:
        """The document to which the token at `position` belongs. Halves the file at remembered starts, then reads one
        block."""
        low, high = 0, self.documents
        while high - low > BLOCK:
            middle = (low + high) // 2
            if middle not in self._starts:
                self._starts[middle] = int(self.starts(middle, middle + 1)[0])
            low, high = (middle, high) if self._starts[middle] <= position else (low, middle)
        return low + int(np.searchsorted(self.starts(low, high), position, side="right")) - 1

    def document_starts(self, first: int, stop: int) -> list[int]:
        """Positions in (first, stop) at which another document begins (empty documents do not count)."""
        begun = self.starts(self.document_at(first) + 1, self.document_at(stop - 1) + 1)
        return [int(position) for position in np.unique(begun)]

    def facts(self) -> Facts:
        """The facts in PREFIX.json; none for a file that was not made here."""
        return read_facts(self.prefix)

    def identity(self) -> str:
        """A hash of the content: all bytes of a small file, 64 blocks spread over a large one."""
        state = xxhash.xxh3_128(f"{self.tokens.dtype.str},{self.tokens.nbytes},{self.documents}".encode())
        for _, tokens, span in self._samples():
            state.update(tokens.view(np.uint8)[span].data)
        return state.hexdigest()

    def first_beyond(self, vocab_size: int) -> int | None:
        """Position of the first token that is no id below `vocab_size`, among the tokens that the identity covers: at
        hand, and enough to find another tokenizer's."""
        for first, tokens, _ in self._samples():
            if len(places := places_beyond(tokens, vocab_size)):
                return first + int(places[0])
        return None

    def _samples(self) -> Iterator[tuple[int, npt.NDArray[Any], slice]]:
        """The tokens that stand for the content: position of the first, tokens, and their bytes that count."""
        size, width = self.tokens.nbytes, self.tokens.itemsize
        starts = [(size - HASH_BLOCK) * block // (HASH_BLOCKS - 1) for block in range(HASH_BLOCKS)]
        for start, length in [(0, size)] if size <= HASH_WHOLE else [(start, HASH_BLOCK) for start in starts]:
            first, begin = divmod(start, width)
            yield first, self.tokens[first : -(-(start + length) // width)], slice(begin, begin + length)

    def _problems(self, size: int) -> Iterator[Problem]:
        """Faults that the ends, entries spread over the index, and all document boundaries (8 bytes each) show."""
        index, data, width = with_suffix(self.prefix, ".idx"), with_suffix(self.prefix, ".bin"), self.tokens.itemsize
        count = len(self.pointers)
        if not count or not size:
            yield _damaged(data, f"holds no tokens ({size} bytes, {count} sequences)")
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * width
        if end != size:
            described = f"{end:,} ({end // width:,} tokens of {width} bytes)"
            yield _damaged(data, f"has {size:,} bytes, {index.name} describes {described}")
        for place in range(SAMPLED_CHECKS):
            first = (count - min(count, SAMPLED_ROWS)) * place // (SAMPLED_CHECKS - 1)
            yield from self._broken_sequences(first, min(first + SAMPLED_ROWS, count))
        last = 0  # the sequence at which the document before begins
        for first in range(0, self.documents + 1, ROWS):
            piece = self.boundaries[first : first + ROWS]
            for at in np.flatnonzero(np.diff(piece, prepend=last) < 0):
                yield _damaged(index, f"document {first + at - 1:,} ends before it starts, at sequence {piece[at]:,}")
            last = piece[-1]
        if len(self.boundaries) == 0 or self.boundaries[0] != 0 or last != count:
            yield _damaged(index, f"document boundaries do not run from 0 to {count:,}, the number of sequences")

    def _broken_sequences(self, first: int, stop: int) -> Iterator[Problem]:
        """The sequences of [first, stop) whose length and pointers contradict each other."""
        lengths = self.lengths[first:stop].astype(np.int64)
        behind = [self.tokens.nbytes] if stop == len(self.pointers) else []
        ends = np.append(self.pointers[first + 1 : stop + 1], behind)
        starts = self.pointers[first:stop].astype(np.int64)
        right = (lengths >= 0) & (starts + lengths * self.tokens.itemsize == ends)
        right[:1] &= first > 0 or starts[0] == 0
        for at in np.flatnonzero(~right):
            facts = f"starts at byte {starts[at]:,} with {lengths[at]:,} tokens, the next one at byte {int(ends[at]):,}"
            yield _damaged(with_suffix(self.prefix, ".idx"), f"sequence {first + at:,} {facts}")


def verify(prefix: Path, vocab_size: int | None, progress: Callable[..., None] | None = None) -> TokenFile:
    """The file, if every index entry and every token id of it is sound; else UserError naming the first broken sequence
    or document. Without `vocab_size`, that of PREFIX.json holds. `progress`: see open.py."""
    file = TokenFile.open(prefix)
    facts, data = file.facts(), with_suffix(prefix, ".bin")
    size = vocab_size if vocab_size is not None else facts.vocab_size
    if size is None:
        rule = "the vocabulary size is neither given nor in a file of ours"
        raise UserError(Problem("model.vocab_size", None, rule, "model.vocab_size=N"))
    for start in range(0, len(file.pointers), ROWS):
        if problem := next(file._broken_sequences(start, min(start + ROWS, len(file.pointers))), None):
            raise UserError(problem)
    total, width, state = len(file.tokens), file.tokens.itemsize, xxhash.xxh3_128()
    first, beyond = -1, 0
    for start in range(0, total, SCANNED):
        tokens = file.tokens[start : start + SCANNED]
        state.update(tokens.data)
        places = places_beyond(tokens, size)
        first = start + int(places[0]) if len(places) and not beyond else first
        beyond += len(places)
        if progress:
            done = start + len(tokens)
            progress(done * width, total * width, file.document_at(done - 1) + 1, done)
    if beyond:
        at = f"{file.tokens[first]} in document {file.document_at(first):,} (token {first:,})"
        rule = f"token id {at} is outside the vocabulary of {size:,}; {beyond:,} such tokens in all"
        remedy = "give the vocabulary size of the tokenizer that made the file, or prepare the data again"
        raise UserError(Problem("data.path", str(data), rule, remedy))
    if facts.xxh3_128 not in (None, state.hexdigest()):
        raise UserError(_damaged(data, f"its content is not what was prepared (by its hash in {prefix.name}.json)"))
    return file


def read_facts(prefix: Path) -> Facts:
    """The facts in PREFIX.json; none without the file."""
    path, remedy = with_suffix(prefix, ".json"), "delete it, or prepare the data again"
    return as_record(Facts, read_object(path, remedy), path, remedy) if os.path.lexists(path) else Facts()


def _damaged(path: Path, rule: str) -> Problem:
    return Problem("data.path", str(path), rule, "copy it again, or delete it and prepare the data again")
