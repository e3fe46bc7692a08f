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
from typing import NamedTuple

import torch
import xxhash

from megalite.checkpoint.manifest import DTYPES, FileRecord, StoredBox, StoredTensor
from megalite.checkpoint.pieces import Piece, tiling_fault

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_BYTES = 1 << 20  # written at a time: it stays in the processor's cache while it is hashed


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

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * DTYPES[self.dtype].itemsize


def data_file(rank: int) -> str:
    """The name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def plan_writes(held: Sequence[Sequence[HeldBox]]) -> list[list[int]]:
    """The boxes that each rank writes, by their numbers among those it holds and in the order of its file: each box is
    given to the least loaded of the ranks that hold it, largest box first."""
    holders: dict[HeldBox, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
        assert len(set(boxes)) == len(boxes), f"rank {rank} holds a box twice"
    load = [0] * len(held)
    writer: dict[HeldBox, int] = {}
    for box in sorted(holders, key=lambda box: (-box.bytes, box)):
        writer[box] = min(holders[box], key=lambda rank: load[rank])
        load[writer[box]] += box.bytes
    chosen = []
    for rank, boxes in enumerate(held):
        mine = [(-DTYPES[box.dtype].itemsize, at) for at, box in enumerate(boxes) if writer[box] == rank]
        chosen.append([at for _, at in sorted(mine)])  # wide elements first, which aligns every box in its file
    return chosen


def write_file(path: Path, pieces: Sequence[Piece]) -> FileRecord:
    """Write the pieces into a new safetensors file that is on disk when the call returns."""
    hashed = xxhash.xxh3_128()
    with open(path, "xb") as file:
        for data in _contents(pieces):
            for at in range(0, len(data), _CHUNK_BYTES):
                chunk = data[at : at + _CHUNK_BYTES]
                hashed.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        if os.fstat(file.fileno()).st_size != file.tell():
            raise OSError(errno.EIO, "the file system kept less than was written")
        return FileRecord(file.tell(), hashed.hexdigest())


def _contents(pieces: Sequence[Piece]) -> Iterator[memoryview]:
    """The bytes of a file, without a copy where a tensor lies in host memory in row-major order."""
    header, _ = _header([HeldBox.of(piece) for piece in pieces])
    yield memoryview(header)
    for piece in pieces:
        tensor = piece.tensor.detach().cpu().contiguous()
        yield tensor.view(-1).view(torch.uint8).numpy().data


def _header(boxes: Sequence[HeldBox]) -> tuple[bytes, list[int]]:
    """What the safetensors file of these boxes begins with, and the byte at which each of them starts.

    A whole tensor has its logical name in the file. The name of a part ends with its offsets, `name@8,0`.
    """
    ends = [0, *accumulate(box.bytes for box in boxes)]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for at, box in enumerate(boxes):
        key = box.name if box.sizes == box.shape else f"{box.name}@{','.join(map(str, box.offsets))}"
        entries[key] = {"dtype": box.dtype, "shape": box.sizes, "data_offsets": ends[at : at + 2]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in ends[:-1]]


def stored_tensors(written: Sequence[Sequence[HeldBox]]) -> dict[str, StoredTensor]:
    """What the manifest says of the tensors whose boxes the ranks have written, by rank in the order of its file.

    The boxes of a tensor must cover it exactly once. A state with a gap is a bug of ours, found before the commit.
    """
    tensors: dict[str, StoredTensor] = {}
    for rank, boxes in enumerate(written):
        for box, start in zip(boxes, _header(boxes)[1], strict=True):
            stored = tensors.setdefault(box.name, StoredTensor(box.dtype, box.shape, []))
            assert stored[:2] == box[1:3], f"boxes of {box.name} differ in dtype or logical shape"
            stored.boxes.append(StoredBox(data_file(rank), start, box.offsets, box.sizes))
    for name, tensor in tensors.items():
        fault = tiling_fault(tensor.shape, [box[2:] for box in tensor.boxes])
        assert fault is None, f"the state is not whole: {name} {fault}"
    return tensors
