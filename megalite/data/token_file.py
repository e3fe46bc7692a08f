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
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.config.user_files import as_record, read_object, refusing
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: the arrays behind it are not aligned
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
ROWS, LOOKS = 1 << 14, 256  # entries of the index that are checked at once, and how often when a file is opened
SCANNED = 1 << 24  # tokens at once
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


def first_beyond(tokens: npt.NDArray[Any], vocab_size: int) -> int | None:
    """Place of the first stored token of `tokens` [n] that is no id below `vocab_size`."""
    ids = ids_of(tokens)
    places = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    return int(places[0]) if len(places) else None


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX.bin for `.bin` (a prefix may have dots of its own)."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class DiskArray:
    """`count` numbers from byte `offset` of an open file on; a slice of them is read and given as a numpy array.

    Not a memory map: where a page of a map is gone (the file was cut short, its disk fails) the system ends the process
    without a word. A read that comes up short is a refusal that names the file.
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
        size, bytes_of_index = (os.fstat(file.fileno()).st_size for file in (data, index))
        head = index.read(HEADER.size).ljust(HEADER.size, b"\0")
        magic, version, code, sequences, boundaries = HEADER.unpack(head)
        if magic != MAGIC or version != 1 or code not in DTYPES:
            rule = f"has {bytes_of_index:,} bytes and starts with {magic!r}, version {version}, dtype code {code}"
            known = f"an index starts with {MAGIC!r}, version 1 and a dtype code of {sorted(DTYPES)}"
            raise UserError(_damaged(Path(index.name), f"{rule}; {known}"))
        dtype, long, at = np.dtype(DTYPES[code]), np.dtype("<i8"), HEADER.size
        end = at + 12 * sequences + 8 * boundaries
        if bytes_of_index not in (end, end + sequences):  # with the modes of a multimodal file
            rule = f"has {bytes_of_index:,} bytes; {sequences:,} sequences and {boundaries:,} boundaries need {end:,}"
            raise UserError(_damaged(Path(index.name), rule))
        file = cls(
            prefix=prefix,
            tokens=DiskArray(data, dtype, 0, size // dtype.itemsize),
            lengths=DiskArray(index, np.dtype("<i4"), at, sequences),
            pointers=DiskArray(index, long, at + 4 * sequences, sequences),
            boundaries=DiskArray(index, long, at + 12 * sequences, boundaries),
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
        begun = self.boundaries[self.document_at(first) + 1 : self.document_at(stop - 1) + 1]
        if not len(begun):
            return []
        if np.any(begun[1:] < begun[:-1]):  # an entry that was not checked when the file was opened
            raise UserError(
                _damaged(with_suffix(self.prefix, ".idx"), f"a document near token {first:,} ends too early")
            )
        pointers = self.pointers[int(begun[0]) : int(begun[-1]) + 1][begun - begun[0]]
        return [int(position) for position in np.unique(pointers // self.tokens.dtype.itemsize)]

    def identity(self) -> str:
        """A hash of the content: all bytes of a small file, 64 blocks spread over a large one."""
        state = xxhash.xxh3_128(f"{self.tokens.dtype.str},{self.tokens.nbytes},{self.documents}".encode())
        content = replace(self.tokens, dtype=np.dtype(np.uint8), count=self.tokens.nbytes)
        for start, length in self._blocks():
            state.update(content[start : start + length].data)
        return state.hexdigest()

    def stranger(self, vocab_size: int) -> int | None:
        """Position of the first token that is no id below `vocab_size`, among the tokens that the identity covers: at
        hand, and enough to find another tokenizer's."""
        width = self.tokens.dtype.itemsize
        for start, length in self._blocks():
            first = start // width
            if (at := first_beyond(self.tokens[first : -(-(start + length) // width)], vocab_size)) is not None:
                return first + at
        return None

    def beyond_vocabulary(self, position: int, vocab_size: int, sample: str = "") -> Problem:
        """The token at `position` is none that the model has an embedding for."""
        place = f"token {position:,} (document {self.document_at(position):,}{sample})"
        rule = f"token id {self.tokens[position]} at {place} is outside the vocabulary of {vocab_size:,}"
        remedy = "model.vocab_size of its tokenizer, or prepare it again; megalite prepare --verify scans it all"
        return Problem("data.path", str(with_suffix(self.prefix, ".bin")), rule, remedy)

    def check(self, size: int, step: int) -> None:
        """UserError where the ends of the index, or ROWS entries at each `step`-th one, do not fit each other and
        `size` bytes of data."""
        data, index = with_suffix(self.prefix, ".bin"), with_suffix(self.prefix, ".idx")
        count, width = len(self.pointers), self.tokens.dtype.itemsize
        if not count or not size:
            raise UserError(_damaged(data, f"holds no tokens ({size} bytes, {count} sequences)"))
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * width
        if end != size:
            described = f"{end:,} ({end // width:,} tokens of {width} bytes)"
            raise UserError(_damaged(data, f"has {size:,} bytes, {index.name} describes {described}"))
        if not len(self.boundaries) or self.boundaries[0] != 0 or self.boundaries[-1] != count:
            rule = f"document boundaries do not run from 0 to {count:,}, the number of sequences"
            raise UserError(_damaged(index, rule))
        for first in range(0, max(count, len(self.boundaries)), step):
            pieces = self.boundaries[first : first + ROWS + 1]
            for at in np.flatnonzero(pieces[1:] < pieces[:-1])[:1]:
                raise UserError(_damaged(index, f"document {first + at:,} ends before it starts"))
            lengths = self.lengths[first : first + ROWS].astype(np.int64)
            starts = self.pointers[first : first + ROWS + 1]
            starts = np.append(starts, size) if len(starts) == len(lengths) else starts
            wrong = (lengths < 0) | (starts[:-1] + lengths * width != starts[1:])
            for at in np.flatnonzero(wrong)[:1]:
                facts = f"starts at byte {starts[at]:,} with {lengths[at]:,} tokens, the next at {starts[at + 1]:,}"
                raise UserError(_damaged(index, f"sequence {first + at:,} {facts}"))

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
        tokens = file.tokens[start : start + SCANNED]
        state.update(tokens.data)
        if (at := first_beyond(tokens, size)) is not None:
            raise UserError(file.beyond_vocabulary(start + at, size))
        if progress:
            done = start + len(tokens)
            progress(done * width, total * width, file.document_at(done - 1) + 1, done)
    if file.facts.xxh3_128 not in (None, state.hexdigest()):
        rule = f"its content is not what was prepared (by its hash in {prefix.name}.json)"
        raise UserError(_damaged(with_suffix(prefix, ".bin"), rule))
    return file


def read_facts(prefix: Path) -> Facts:
    """The facts in PREFIX.json; none without the file."""
    path, remedy = with_suffix(prefix, ".json"), "delete it, or prepare the data again"
    return as_record(Facts, read_object(path, remedy), path, remedy) if os.path.lexists(path) else Facts()


def _opened(path: Path) -> BinaryIO:
    """A regular file, open for reading; a pipe is not waited for."""
    if not os.path.lexists(path):
        remedy = "give the path of a token file without .bin; both .bin and .idx are needed"
        raise UserError(Problem("data.path", str(path), "is missing", remedy))
    with refusing(path, "check its permissions"):
        if not path.is_file():
            raise ValueError("is not a regular file")
        return path.open("rb", buffering=0)


def _damaged(path: Path, rule: str) -> Problem:
    return Problem("data.path", str(path), rule, "copy it again, or delete it and prepare the data again")
