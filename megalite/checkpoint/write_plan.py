"""Who writes which box: worked out by rank 0, as a pure function of what all ranks hold.

A box that several ranks hold (replicas) is written by one of them. Largest first, each goes to the least loaded of its
holders, which spreads the bytes evenly. The boxes of a tensor must cover it exactly once: a state with a gap is a bug
of ours, and found before anything is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megalite.checkpoint.pieces import Box, Piece, tiling_fault

Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and logical shape of a tensor


@dataclass(frozen=True)
class PlannedBox:
    """One box of a logical tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class WritePlan:
    """The tensors of one checkpoint by name, and for each rank the boxes that it writes, in the order of its own list.

    `marks`: by rank, a letter for each box that it holds, in that order: "w", or "-" where another rank writes it.
    """

    tensors: dict[str, Kind]
    boxes: tuple[tuple[PlannedBox, ...], ...]
    marks: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.tensors.values())


def by_tensor(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    """The pieces of each tensor; the order in which ranks speak of their boxes."""
    named: dict[str, list[Piece]] = {}
    for piece in pieces:
        named.setdefault(piece.name, []).append(piece)
    return named


def held(pieces: Sequence[Piece]) -> list[Any]:
    """What this rank could write, as JSON: for each tensor its name, dtype, shape and boxes (offsets, sizes)."""
    said = []
    for name, parts in by_tensor(pieces).items():
        first = parts[0]
        assert all(
            (part.logical_shape, part.tensor.dtype) == (first.logical_shape, first.tensor.dtype)
            and len(part.offsets) == part.tensor.dim() == len(part.logical_shape)
            for part in parts
        ), f"pieces of {name} do not belong together"
        assert len({part.offsets for part in parts}) == len(parts), f"a piece of {name} is held twice"
        boxes = [[list(part.offsets), list(part.tensor.shape)] for part in parts]
        said.append([name, str(first.tensor.dtype).removeprefix("torch."), list(first.logical_shape), boxes])
    return said


def share(pieces: Sequence[Piece], marks: str) -> list[Piece]:
    """Those of this rank's pieces that it writes, in the order of the plan."""
    in_order = [piece for parts in by_tensor(pieces).values() for piece in parts]
    return [piece for piece, mark in zip(in_order, marks, strict=True) if mark == "w"]


def plan_writes(everyone: Sequence[list[Any]]) -> WritePlan:
    """The plan for what the ranks `held`, by rank."""
    tensors: dict[str, Kind] = {}
    boxes_of: list[list[PlannedBox]] = []
    for rank, said in enumerate(everyone):
        boxes_of.append([])
        for name, dtype, shape, boxes in said:
            kind = (getattr(torch, dtype), tuple(shape))
            assert tensors.setdefault(name, kind) == kind, f"rank {rank} holds another {name} than the ranks before"
            boxes_of[-1] += [PlannedBox(name, tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
    holders: dict[PlannedBox, list[int]] = {}
    for rank, boxes in enumerate(boxes_of):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    _refuse_gaps(tensors, holders)
    writer = _writers(tensors, holders, len(everyone))
    return WritePlan(
        tensors,
        tuple(tuple(box for box in boxes if writer[box] == rank) for rank, boxes in enumerate(boxes_of)),
        tuple("".join("w" if writer[box] == rank else "-" for box in boxes) for rank, boxes in enumerate(boxes_of)),
    )


def _refuse_gaps(tensors: dict[str, Kind], holders: dict[PlannedBox, list[int]]) -> None:
    parts: dict[str, list[Box]] = {}
    for box in holders:
        parts.setdefault(box.name, []).append((box.offsets, box.sizes))
    for name, (_, shape) in tensors.items():
        fault = tiling_fault(shape, parts[name])
        assert fault is None, f"the state is not whole: {name} {fault}"


def _writers(tensors: dict[str, Kind], holders: dict[PlannedBox, list[int]], ranks: int) -> dict[PlannedBox, int]:
    """Each box to the least loaded of its holders, largest first; names and offsets decide between equals."""
    size = {box: prod(box.sizes) * tensors[box.name][0].itemsize for box in holders}
    load = [0] * ranks
    writer = {}
    for box in sorted(holders, key=lambda box: (-size[box], box.name, box.offsets)):
        writer[box] = min(holders[box], key=lambda rank: (load[rank], rank))
        load[writer[box]] += size[box]
    return writer
