"""Token files as Megatron-LM writes them: PREFIX.bin holds the tokens, PREFIX.idx says where documents start.

PREFIX.idx (little-endian): magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences n, u64 boundaries d; then
i32 lengths [n] in tokens, i64 pointers [n] in bytes, i64 boundaries [d]: document k is made of sequences
boundaries[k] .. boundaries[k + 1] - 1. Behind them, multimodal files have i8 modes [n], which are passed over: an id is
an id. Our documents are one sequence each, unless they have more than 2^31 - 1 tokens; those of others any number.
Reading maps both files and touches only what is asked for. PREFIX.json is ours: what is known about the text.
"""

import json
import struct
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.config.problems import Problem, UserError
from megalite.data.permutation import IntArray

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes: the arrays behind it are not aligned
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
SAMPLED_CHECKS = 1024  # index entries that are checked when a file is opened
HASH_WHOLE = 16 << 20  # bytes up to which the identity covers every byte
HASH_BLOCKS, HASH_BLOCK = 64, 64 << 10


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Megatron's choice: 16 bits where every id fits with room to spare."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def largest_id(dtype: np.dtype[Any]) -> int:
    """Up to here every id can be stored; floats skip whole numbers beyond."""
    return 2 ** (np.finfo(dtype).nmant + 1) if dtype.kind == "f" else int(np.iinfo(dtype).max)


def ids_of(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Stored tokens [n] as whole numbers [n]; -1, which no vocabulary has, for a float that is none."""
    if tokens.dtype.kind != "f":
        return tokens
    whole = (tokens == np.floor(tokens)) & (np.abs(tokens) < 2**63)
    return np.where(whole, tokens, -1).astype(np.int64)


def with_suffix(prefix: Path, suffix: str) -> Path:
    """PREFIX.bin for `.bin` (a prefix may have dots of its own)."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True)
class TokenFile:
    """One mapped token file. `tokens` [tokens]; `lengths`, `pointers` [sequences]; `boundaries` [documents + 1]."""

    prefix: Path
    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    boundaries: npt.NDArray[np.int64]

    @classmethod
    def open(cls, prefix: Path) -> "TokenFile":
        """Map PREFIX.bin and PREFIX.idx; UserError if they are missing, damaged or do not belong together."""
        index, data = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
        for path in (data, index):
            if not path.is_file():
                raise _damaged(
                    path, "is missing", "give the path of a token file without .bin; both .bin and .idx are needed"
                )
        raw = (
            np.memmap(index, dtype=np.uint8, mode="r").view(np.ndarray)
            if index.stat().st_size
            else np.empty(0, np.uint8)
        )
        dtype, sequences, boundaries = _read_header(index, raw)
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * sequences
        boundaries_at = pointers_at + 8 * sequences
        end = boundaries_at + 8 * boundaries
        if len(raw) not in (end, end + sequences):  # with the modes of a multimodal file
            rule = f"has {len(raw):,} bytes; {sequences:,} sequences and {boundaries:,} boundaries need {end:,}"
            raise _damaged(index, rule, "copy it again: it is truncated or damaged")
        size = data.stat().st_size
        file = cls(
            prefix=prefix,
            tokens=np.memmap(data, dtype=dtype, mode="r", shape=(size // dtype.itemsize,)).view(np.ndarray)
            if size >= dtype.itemsize
            else np.empty(0, dtype),
            lengths=raw[lengths_at:pointers_at].view("<i4"),
            pointers=raw[pointers_at:boundaries_at].view("<i8"),
            boundaries=raw[boundaries_at:end].view("<i8"),
        )
        file._check(size)
        return file

    @property
    def documents(self) -> int:
        return len(self.boundaries) - 1

    def document_start(self, document: int) -> int:
        """Position of the first token of `document`; of the end of the file for the number of documents."""
        sequence = int(self.boundaries[document])
        return (
            len(self.tokens) if sequence == len(self.pointers) else int(self.pointers[sequence]) // self.tokens.itemsize
        )

    def document_at(self, position: int) -> int:
        """Which document the token at `position` belongs to. Bisection by hand: numpy's searchsorted would copy the
        whole unaligned array."""
        return bisect_right(range(self.documents), position, key=self.document_start) - 1

    def document_starts(self, first: int, stop: int) -> list[int]:
        """Positions in (first, stop) at which another document begins (empty documents do not count)."""
        starts: list[int] = []
        document = self.document_at(first) + 1
        while document < self.documents and (start := self.document_start(document)) < stop:
            if start != (starts[-1] if starts else first):
                starts.append(start)
            document += 1
        return starts

    def sidecar(self) -> dict[str, Any]:
        """What PREFIX.json says; empty for a file that was not made here."""
        return read_sidecar(self.prefix)

    def identity(self) -> str:
        """A hash of the content: of all bytes of a small file, of 64 blocks spread over a large one."""
        size = self.tokens.nbytes
        state = xxhash.xxh3_128(f"{self.tokens.dtype.str},{size},{self.documents}".encode())
        raw = self.tokens.view(np.uint8)
        for start, stop in self._spans():
            state.update(raw[start:stop].data)
        return state.hexdigest()

    def first_beyond(self, vocab_size: int) -> int | None:
        """Position of the first token that is no id below `vocab_size`, among those that the identity covers: at hand,
        and enough to find another tokenizer's."""
        width = self.tokens.itemsize
        for start, stop in self._spans():
            first = -(-start // width)
            ids = ids_of(self.tokens[first : stop // width])
            wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if len(wrong):
                return first + int(wrong[0])
        return None

    def _spans(self) -> list[tuple[int, int]]:
        """The bytes that stand for the content: all of a small file, 64 blocks spread over a large one."""
        size = self.tokens.nbytes
        if size <= HASH_WHOLE:
            return [(0, size)]
        starts = [(size - HASH_BLOCK) * block // (HASH_BLOCKS - 1) for block in range(HASH_BLOCKS)]
        return [(start, start + HASH_BLOCK) for start in starts]

    def _check(self, size: int) -> None:
        """Everything that is cheap at any size: the ends, and entries spread over the index."""
        index, data, width = with_suffix(self.prefix, ".idx"), with_suffix(self.prefix, ".bin"), self.tokens.itemsize
        again = "copy both files again: they do not belong together or one is damaged"
        if not len(self.pointers) or not size:
            raise _damaged(data, f"holds no tokens ({size} bytes, {len(self.pointers)} sequences)", "prepare it again")
        told = int(self.pointers[-1]) + int(self.lengths[-1]) * width
        if told != size:
            rule = f"has {size:,} bytes, {index.name} describes {told:,} ({told // width:,} tokens of {width} bytes)"
            raise _damaged(data, rule, again)
        ends = (int(self.boundaries[0]), int(self.boundaries[-1])) if len(self.boundaries) else (0, 0)
        if ends != (0, len(self.pointers)):
            rule = (
                f"document boundaries run from {ends[0]:,} to {ends[1]:,}, sequences from 0 to {len(self.pointers):,}"
            )
            raise _damaged(index, rule, again)
        if self.pointers[0]:
            raise _damaged(index, f"its first sequence starts at byte {int(self.pointers[0]):,}, not at 0", again)
        count = len(self.pointers)
        sampled = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_CHECKS)).astype(np.int64))
        if broken := broken_sequence(self, sampled):
            raise _damaged(index, broken, again)


def broken_sequence(file: TokenFile, sequences: IntArray) -> str:
    """The first of `sequences` whose length and pointers contradict each other, in words; empty if none."""
    last = len(file.pointers) - 1
    lengths = file.lengths[sequences].astype(np.int64)
    pointers = file.pointers[sequences]
    ends = np.where(sequences < last, file.pointers[np.minimum(sequences + 1, last)], file.tokens.nbytes)
    wrong = np.flatnonzero((lengths < 0) | (pointers + lengths * file.tokens.itemsize != ends))
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return (
        f"sequence {int(sequences[at]):,} starts at byte {int(pointers[at]):,} with {int(lengths[at]):,} tokens, "
        f"the next one at byte {int(ends[at]):,}"
    )


def read_sidecar(prefix: Path) -> dict[str, Any]:
    """What PREFIX.json says; empty if there is none."""
    path = with_suffix(prefix, ".json")
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _damaged(path, f"is not JSON ({error})", "delete it, or prepare the data again") from error
    if not isinstance(facts, dict):
        raise _damaged(path, "does not hold a JSON object", "delete it, or prepare the data again")
    return facts


def _read_header(index: Path, raw: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """Token dtype, number of sequences, number of document boundaries."""
    if len(raw) < HEADER.size:
        raise _damaged(
            index, f"has {len(raw)} bytes, its header alone needs {HEADER.size}", "copy it again: it is truncated"
        )
    magic, version, code, sequences, boundaries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _damaged(index, f"starts with {magic!r}, an index starts with {MAGIC!r}", "give a Megatron token file")
    if version != 1:
        raise _damaged(index, f"has version {version}, only version 1 is known", "prepare the data again")
    if code not in DTYPES:
        raise _damaged(index, f"has dtype code {code}, known are {sorted(DTYPES)}", "prepare the data again")
    return np.dtype(DTYPES[code]), sequences, boundaries


def _damaged(path: Path, rule: str, remedy: str) -> UserError:
    return UserError(Problem("data.path", str(path), rule, remedy))
