"""Writes boxes into safetensors files: which rank writes which box, and the one file of each rank.

Rank 0 assigns the boxes (`plan_writes`). A box that several ranks hold (replicas) is written by one of them, so that
the bytes are spread evenly. A file is streamed from the live tensors, header first: `safetensors.torch.save_file` would
hold all of them a second time. Every byte is hashed on its way to the file, so that the hash is that of the intended
content and not of what a failing disk kept.
"""

import errno
import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from megalite.checkpoint.manifest import CHUNK_BYTES, DTYPES, FileRecord, StoredBox, StoredTensor
from megalite.checkpoint.pieces import Piece, tiling_fault

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HeldBox(NamedTuple):
    """A box that a rank could write."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the logical tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, piece: Piece) -> "HeldBox":
        tensor = piece.tensor
        return cls(piece.name, _DTYPE_NAMES[tensor.dtype], piece.logical_shape, piece.offsets, tuple(tensor.shape))

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> "HeldBox":
        """A box that was sent as JSON."""
        name, dtype, *numbers = fields
        return cls(name, dtype, *(tuple(each) for each in numbers))

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * DTYPES[self.dtype].itemsize


class WritePlan(NamedTuple):
    """The boxes that each rank writes, by their numbers in the rank's own list and in the order of its file."""

    boxes: list[list[int]]
    bytes: int  # of all of them


def data_file(rank: int) -> str:
    """The name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def plan_writes(held_by: Sequence[Sequence[Sequence[Any]]]) -> WritePlan:
    """Give each box to the least loaded of the ranks that hold it, largest box first.

    `held_by`: the fields of the boxes that each rank holds. The boxes of a tensor must cover it exactly once. A state
    with a gap is a bug of ours, found before a byte is written.
    """
    held = [[HeldBox.parse(box) for box in boxes] for boxes in held_by]
    holders: dict[HeldBox, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
        assert len(set(boxes)) == len(boxes), f"rank {rank} holds a box twice"
    tensors: dict[str, list[HeldBox]] = {}
    for box in holders:
        tensors.setdefault(box.name, []).append(box)
    for name, boxes in tensors.items():
        first = boxes[0]
        assert all(box[1:3] == first[1:3] for box in boxes), f"boxes of {name} differ in dtype or logical shape"
        fault = tiling_fault(first.shape, [(box.offsets, box.sizes) for box in boxes])
        assert fault is None, f"the state is not whole: {name} {fault}"
    load = [0] * len(held)
    writer: dict[HeldBox, int] = {}
    for box in sorted(holders, key=lambda box: (-box.bytes, box)):
        writer[box] = min(holders[box], key=lambda rank: load[rank])
        load[writer[box]] += box.bytes
    chosen = []
    for rank, boxes in enumerate(held):
        mine = [(-DTYPES[box.dtype].itemsize, at) for at, box in enumerate(boxes) if writer[box] == rank]
        chosen.append([at for _, at in sorted(mine)])  # wide elements first, which aligns every box in its file
    return WritePlan(chosen, sum(load))


class WrittenFile(NamedTuple):
    """One rank's file, and what the manifest says of the tensors in it."""

    name: str
    record: FileRecord
    tensors: dict[str, StoredTensor]


def write_file(path: Path, pieces: Sequence[Piece]) -> WrittenFile:
    """Write the pieces into a new safetensors file that is on disk when the call returns."""
    header, tensors = _header(path.name, pieces)
    hashed, written = xxhash.xxh3_128(), 0
    try:
        with open(path, "xb", buffering=0) as file:
            for data in _contents(header, pieces):
                for at in range(0, len(data), CHUNK_BYTES):
                    chunk = data[at : at + CHUNK_BYTES]
                    hashed.update(chunk)
                    while chunk:
                        count = file.write(chunk)
                        chunk, written = chunk[count:], written + count
            os.fsync(file.fileno())
            if os.fstat(file.fileno()).st_size != written:
                raise OSError(errno.EIO, "the file system kept less than was written")
    except OSError as error:
        raise OSError(error.errno, error.strerror, path.name) from error
    return WrittenFile(path.name, FileRecord(written, hashed.hexdigest()), tensors)


def _header(file: str, pieces: Sequence[Piece]) -> tuple[bytes, dict[str, StoredTensor]]:
    """What a safetensors file begins with, and where each piece lies in it.

    A whole tensor has its logical name in the file. The name of a part ends with its offsets, `name@8,0`.
    """
    boxes = [HeldBox.of(piece) for piece in pieces]
    ends = [0, *accumulate(box.bytes for box in boxes)]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for at, box in enumerate(boxes):
        key = box.name if box.sizes == box.shape else f"{box.name}@{','.join(map(str, box.offsets))}"
        entries[key] = {"dtype": box.dtype, "shape": box.sizes, "data_offsets": ends[at : at + 2]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    tensors: dict[str, StoredTensor] = {}
    for box, start in zip(boxes, ends, strict=False):
        stored = tensors.setdefault(box.name, StoredTensor(box.dtype, box.shape, []))
        stored.boxes.append(StoredBox(file, len(header) + start, box.offsets, box.sizes))
    return header, tensors


def _contents(header: bytes, pieces: Sequence[Piece]) -> Iterator[memoryview]:
    """The bytes of a file, without a copy where a tensor lies in host memory in row-major order."""
    yield memoryview(header)
    for piece in pieces:
        tensor = piece.tensor.detach().cpu().contiguous()
        yield tensor.view(-1).view(torch.uint8).numpy().data
