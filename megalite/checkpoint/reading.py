"""Fills live tensors from a verified checkpoint, whatever layout wrote it.

Names, shapes and dtypes are compared over all ranks before the first tensor is touched: a load that fails half-way
would mix two states, and one that leaves out what nobody asks for would lose state in silence. Each rank then reads,
of each stored box, only the bytes from the first to the last element that it needs.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.failure import CheckpointError, StorageFailure, together
from megalite.checkpoint.manifest import DTYPES, StoredTensor
from megalite.checkpoint.pieces import Piece, overlap
from megalite.errors.problems import Problem
from megalite.launch.context import ParallelContext

_OTHER_MODEL = "use the model and optimizer of the run that wrote it, or another run_dir"
_SHOWN = 10  # tensors named for each kind of difference


def read_pieces(
    path: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece], context: ParallelContext
) -> None:
    """Fill `pieces` from the tensors `saved` in the checkpoint at `path`; see `Found.read_into`."""
    context.agree(_problems(path, saved, pieces, context))
    try:
        together(context, lambda: _read_all(path, saved, pieces))
    except StorageFailure as failure:
        raise CheckpointError(f"{path} could not be read: {failure}") from failure


def _problems(
    path: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece], context: ParallelContext
) -> list[Problem]:
    """Tensors of this rank that the checkpoint lacks or holds in another form, and saved ones that no rank asks for."""
    live = {piece.name: piece for piece in pieces}
    missing = sorted(live.keys() - saved.keys())
    shapes, dtypes = [], []
    for name in sorted(live.keys() & saved.keys()):
        stored, piece = saved[name], live[name]
        if stored.shape != piece.logical_shape:
            shapes.append(f"{name} is {list(stored.shape)} there and {list(piece.logical_shape)} here")
        if DTYPES[stored.dtype] != piece.tensor.dtype:
            dtypes.append(f"{name} is {DTYPES[stored.dtype]} there and {piece.tensor.dtype} here")
    names = sorted(saved)  # the same on all ranks
    wanted = torch.tensor([name in live for name in names], dtype=torch.uint8)  # [tensors]
    if context.control_group is not None and names:
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=context.control_group)
    left = [name for name, by_any in zip(names, wanted.tolist(), strict=True) if not by_any]
    kinds = [
        ("missing", "the checkpoint has no tensor ", missing, _OTHER_MODEL),
        ("of another shape", "", shapes, _OTHER_MODEL),
        ("of another dtype", "", dtypes, "use the precision of the run that wrote it, or another run_dir"),
        ("left over", "this run has no tensor ", left, _OTHER_MODEL),
    ]
    return [
        Problem(str(path), f"{len(items)} {kind}", rule + _some(items), remedy)
        for kind, rule, items, remedy in kinds
        if items
    ]


def _some(items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


class _Read(NamedTuple):
    """Elements of one stored box for a live tensor: `target[...]` gets the elements at `start + stride * index`."""

    file: str
    start: int  # byte of the first element
    strides: list[int]  # of the stored box, in elements
    target: Tensor


def _read_all(folder: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece]) -> None:
    by_file: dict[str, list[_Read]] = {}
    for piece in pieces:
        for read in _reads(saved[piece.name], piece):
            by_file.setdefault(read.file, []).append(read)
    for file, reads in sorted(by_file.items()):
        descriptor = os.open(folder / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for read in sorted(reads, key=lambda read: read.start):
                _read(descriptor, read)
        finally:
            os.close(descriptor)


def _reads(stored: StoredTensor, piece: Piece) -> Iterator[_Read]:
    """What to read for `piece`: from each stored box what both have in common."""
    live = piece.tensor.detach()
    for box in stored.boxes:
        common = overlap((box.offsets, box.sizes), (piece.offsets, live.shape))
        if common is None:
            continue
        offsets, sizes = common
        window = tuple(
            slice(at - first, at - first + size) for at, first, size in zip(offsets, piece.offsets, sizes, strict=True)
        )
        strides = [prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]
        skipped = sum((at - first) * stride for at, first, stride in zip(offsets, box.offsets, strides, strict=True))
        yield _Read(box.file, box.start + skipped * live.itemsize, strides, live[window])


def _read(descriptor: int, read: _Read) -> None:
    """Read the shortest range of the file that holds all elements, straight into the target where it has that form."""
    target = read.target
    reach = sum((size - 1) * stride for size, stride in zip(target.shape, read.strides, strict=True)) + 1  # elements
    direct = target.device.type == "cpu" and target.is_contiguous() and reach == target.numel()
    elements = target if direct else torch.empty(reach, dtype=target.dtype)
    _read_fully(descriptor, elements.view(-1).view(torch.uint8).numpy().data, read.start)
    if not direct:
        target.copy_(elements.as_strided(target.shape, read.strides))


def _read_fully(descriptor: int, into: memoryview, start: int) -> None:
    done = 0
    while done < len(into):  # one call reads at most 2 GiB
        count = os.preadv(descriptor, [into[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early")
        done += count
