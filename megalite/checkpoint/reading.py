"""Fills live tensors from a verified checkpoint, whatever layout wrote it.

Names, shapes and dtypes are compared over all ranks before the first tensor is touched: a load that fails half-way
would mix two states, and one that leaves out what nobody asks for would lose state in silence. Each rank then reads,
of each stored box, only the bytes from the first to the last element that it needs.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint.manifest import DTYPES, StoredBox, StoredTensor
from megalite.checkpoint.pieces import Piece, overlap
from megalite.errors.problems import Problem
from megalite.launch.agreement import together
from megalite.launch.context import ParallelContext

_SHOWN = 10  # tensors named for each kind of difference


def read_pieces(
    path: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece], context: ParallelContext
) -> None:
    """Fill `pieces` from the tensors `saved` in the checkpoint at `path`; see `Found.read_into`."""
    context.agree(_problems(path, saved, pieces, context))
    together(context, lambda: _read_all(path, saved, pieces))


def _problems(
    path: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece], context: ParallelContext
) -> list[Problem]:
    """Tensors of this rank that the checkpoint lacks or holds in another form, and saved ones that no rank asks for."""
    live = {piece.name: piece for piece in pieces}
    names = sorted(saved)  # the same on all ranks
    wanted = torch.tensor([name in live for name in names], dtype=torch.uint8)  # [tensors]
    if context.control_group is not None and names:
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=context.control_group)
    left = [name for name, by_any in zip(names, wanted, strict=True) if not by_any]
    shapes, dtypes = [], []
    for name, stored, piece in ((name, saved[name], live[name]) for name in names if name in live):
        if stored.shape != piece.logical_shape:
            shapes.append(f"{name} is {list(stored.shape)} there and {list(piece.logical_shape)} here")
        if DTYPES[stored.dtype] != piece.tensor.dtype:
            dtypes.append(f"{name} is {DTYPES[stored.dtype]} there and {piece.tensor.dtype} here")
    differences = [
        ("missing", "the checkpoint has no tensor ", sorted(live.keys() - saved.keys())),
        ("of another shape", "", shapes),
        ("of another dtype", "", dtypes),
        ("left over", "this run has no tensor ", left),
    ]
    remedy = "use the model, optimizer and precision of the run that wrote it, or another run_dir"
    return [
        Problem(str(path), f"{len(items)} {what}", rule + _some(items), remedy)
        for what, rule, items in differences
        if items
    ]


def _some(items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _read_all(folder: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece]) -> None:
    by_file: dict[str, list[tuple[StoredBox, Piece]]] = {}
    for piece in pieces:
        for box in saved[piece.name].boxes:
            if overlap((box.offsets, box.sizes), (piece.offsets, piece.tensor.shape)) is not None:
                by_file.setdefault(box.file, []).append((box, piece))
    for name, parts in sorted(by_file.items()):
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            for box, piece in sorted(parts, key=lambda part: part[0].start):
                _read(file, box, piece)


def _read(file: BufferedReader, box: StoredBox, piece: Piece) -> None:
    """What a stored box and a piece have in common: the shortest range of the file that holds all its elements, read
    straight into the piece where it has the same form there."""
    common = overlap((box.offsets, box.sizes), (piece.offsets, piece.tensor.shape))
    assert common is not None
    offsets, sizes = common
    window = tuple(
        slice(at - first, at - first + n) for at, first, n in zip(offsets, piece.offsets, sizes, strict=True)
    )
    target = piece.tensor.detach()[window]
    strides = [prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]  # of the stored box, in elements
    skipped = sum((at - first) * stride for at, first, stride in zip(offsets, box.offsets, strides, strict=True))
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    direct = target.device.type == "cpu" and target.is_contiguous() and reach == target.numel()
    elements = target if direct else torch.empty(reach, dtype=target.dtype)
    content = elements.view(-1).view(torch.uint8).numpy().data
    file.seek(box.start + skipped * target.itemsize)
    if file.readinto(content) < len(content):
        raise OSError(errno.EIO, "the file ends too early")
    if not direct:
        target.copy_(elements.as_strided(target.shape, strides))
