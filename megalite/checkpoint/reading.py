"""Fills live tensors from a verified checkpoint, whatever layout wrote it.

Names, shapes and dtypes are compared over all ranks before the first tensor is touched: a load that fails half-way
would mix two states, and one that leaves out what nobody asks for would lose state in silence. Each rank then reads,
of each stored box, only the bytes from the first to the last element that it needs.
"""

import errno
from collections.abc import Mapping, Sequence
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint.manifest import DTYPES, StoredBox, StoredTensor
from megalite.checkpoint.pieces import Box, Piece, overlap
from megalite.errors.problems import Problem
from megalite.launch.agreement import agree, together
from megalite.launch.context import ParallelContext

_SHOWN = 10  # tensors named for each kind of difference


def read_pieces(
    path: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece], context: ParallelContext
) -> None:
    """Fill `pieces` from the tensors `saved` in the checkpoint at `path`; see `Found.read_into`."""
    remedy, problems = "use the model, optimizer and precision of the run that wrote it, or another run_dir", []
    for kind, found in _differences(saved, {piece.name: piece for piece in pieces}, context).items():
        more = f", and {len(found) - _SHOWN} more" if found[_SHOWN:] else ""
        if found:
            problems.append(Problem(str(path), f"{len(found)} {kind}", ", ".join(found[:_SHOWN]) + more, remedy))
    agree(context, problems)
    together(context, lambda: _read_all(path, saved, pieces))


def _differences(
    saved: Mapping[str, StoredTensor], live: Mapping[str, Piece], context: ParallelContext
) -> dict[str, list[str]]:
    """Tensors of this rank that the checkpoint lacks or holds in another form, and saved ones that no rank asks for."""
    names = sorted(saved)  # the same on all ranks
    wanted = torch.tensor([name in live for name in names], dtype=torch.uint8)  # [tensors]
    if context.control_group is not None and names:
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=context.control_group)
    there = {name: (DTYPES[saved[name].dtype], [*saved[name].shape]) for name in names if name in live}
    here = {name: (live[name].tensor.dtype, [*live[name].logical_shape]) for name in there}
    return {
        "missing": [f"the checkpoint has no tensor {name}" for name in sorted(live.keys() - saved.keys())],
        "of another form": [
            f"{name} is {there[name]} there and {here[name]} here" for name in there if there[name] != here[name]
        ],
        "left over": [f"this run has no tensor {names[at]}" for at in (wanted == 0).nonzero().flatten().tolist()],
    }


def _read_all(folder: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece]) -> None:
    by_file: dict[str, list[tuple[StoredBox, Piece, Box]]] = {}
    for piece in pieces:
        for box in saved[piece.name].boxes:
            common = overlap((box.offsets, box.sizes), (piece.offsets, piece.tensor.shape))
            if common is not None:
                by_file.setdefault(box.file, []).append((box, piece, common))
    for name, parts in sorted(by_file.items()):
        with open(folder / name, "rb") as file:
            for part in sorted(parts, key=lambda part: part[0].start):
                _read(file, *part)


def _read(file: BufferedReader, box: StoredBox, piece: Piece, common: Box) -> None:
    """What a stored box and a piece have in `common`: the shortest range of the file that holds all its elements, read
    straight into the piece where it has the same form there."""
    offsets, sizes = common
    target = piece.tensor.detach()
    for dim, (at, first, size) in enumerate(zip(offsets, piece.offsets, sizes, strict=True)):
        target = target.narrow(dim, at - first, size)
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
