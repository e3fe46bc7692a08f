"""Checkpoints for the tests of this folder: small tensors of every kind, cut in different ways."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import Piece, boxes
from megalite.launch.context import ParallelContext

SINGLE = ParallelContext()

SHAPES: dict[str, tuple[int, ...]] = {
    "blocks.0.qkv.weight": (2, 3, 5, 7),
    "blocks.0.norm.weight": (11,),
    "embedding.word.weight": (64, 12),
    "scale": (),
}
DTYPES = {
    "blocks.0.qkv.weight": torch.float32,
    "blocks.0.norm.weight": torch.bfloat16,
    "embedding.word.weight": torch.float64,
    "scale": torch.int64,
}


def values(step: int) -> dict[str, Tensor]:
    """The logical tensors of a made-up training state; different at every step."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 1000).to(DTYPES[name])
        for name, shape in SHAPES.items()
    }


def whole(tensors: dict[str, Tensor]) -> list[Piece]:
    """Each tensor as one piece: a single process, or a data-parallel replica."""
    return [Piece(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]


def flat_shards(tensors: dict[str, Tensor], rank: int, ranks: int) -> list[Piece]:
    """ZeRO-1: the tensors end to end in one flat range, of which each rank holds an equal part, as boxes.

    The tensors of the pieces are fresh storage, as a rank's own optimizer state is.
    """
    total = sum(t.numel() for t in tensors.values())
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    pieces, base = [], 0
    for name, tensor in tensors.items():
        start, stop = max(first - base, 0), min(last - base, tensor.numel())
        if start < stop:
            flat = tensor.reshape(-1)
            for offsets, sizes, at in boxes(start, stop, tensor.shape):
                count = int(torch.Size(sizes).numel())
                pieces.append(Piece(name, tuple(tensor.shape), offsets, flat[at : at + count].clone().view(sizes)))
        base += tensor.numel()
    return pieces


def column_shards(tensors: dict[str, Tensor], rank: int, ranks: int) -> list[Piece]:
    """Tensor parallelism: split along the last dimension; what is too small to split is held by all."""
    pieces = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or tensor.shape[-1] < ranks:
            pieces += whole({name: tensor.clone()})
            continue
        start, stop = tensor.shape[-1] * rank // ranks, tensor.shape[-1] * (rank + 1) // ranks
        offsets = (*(0 for _ in tensor.shape[:-1]), start)
        pieces.append(Piece(name, tuple(tensor.shape), offsets, tensor[..., start:stop].clone()))
    return pieces


def cut(layout: str, tensors: dict[str, Tensor], rank: int, ranks: int) -> list[Piece]:
    """The pieces of one rank in a layout of this file."""
    if layout == "replicas":
        return whole({name: tensor.clone() for name, tensor in tensors.items()})
    if layout == "flat":
        return flat_shards(tensors, rank, ranks)
    assert layout == "columns", layout
    return column_shards(tensors, rank, ranks)


def blank(pieces: list[Piece]) -> list[Piece]:
    """The same pieces with other values, to be loaded into."""
    return [Piece(p.name, p.logical_shape, p.offsets, torch.full_like(p.tensor, 77)) for p in pieces]


def equal(some: list[Piece], others: list[Piece]) -> bool:
    """Whether two lists of pieces are the same boxes with the same values, bit for bit."""
    return len(some) == len(others) and all(
        (a.name, a.offsets, a.tensor.shape) == (b.name, b.offsets, b.tensor.shape)
        and a.tensor.dtype == b.tensor.dtype
        and torch.equal(a.tensor, b.tensor)
        for a, b in zip(some, others, strict=True)
    )


def index_of(piece: Piece) -> tuple[slice, ...]:
    """The piece as an index into the logical tensor."""
    return tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))


def no_report(text: str) -> None:
    """For places where a report would be a failure of the test."""
    raise AssertionError(text)


def files_below(folder: Path) -> dict[str, Any]:
    """Everything in a folder: names and contents, to show that nothing was touched."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
