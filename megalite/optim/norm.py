"""The norm of a model's gradient, of which each rank adds what it owns, every logical element once."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalite.layout.buffer_layout import BufferSlot, Kind, box_ranges
from megalite.layout.parameters import ShardBox, is_counted
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.sharing import Sharing

NORM_ROW = 4096  # elements
WIDENED = 64 * NORM_ROW  # elements of a narrow dtype that a CPU widens at once: it would copy all of a part


def counted(buffers: TrainingBuffers, sharing: Mapping[Kind, Sharing], *, embeds: bool = True) -> list[Tensor]:
    """The parts of this rank's gradient slices that it counts, as few as possible.

    Of what ranks of tp replicate one counts it, of equal slices those of the first instance, of a tied embedding the
    stage that `embeds`. Padding is zero and may be part of them.
    """

    def elsewhere(slot: BufferSlot, box: ShardBox) -> bool:
        return not (box.counted and is_counted(slot.record, embedding=embeds))

    others = box_ranges(buffers.owned, elsewhere)
    parts = []
    for number, (bucket, gradients) in enumerate(zip(buffers.layout.buckets, buffers.gradients, strict=True)):
        if sharing[bucket.buffer.kind].repeat > 0:
            continue
        start = 0
        for hole in (each for each in others if each.bucket == number):
            parts.append(gradients[start : hole.start])
            start = hole.stop
        parts.append(gradients[start:])
    return [part for part in parts if len(part)]


def gradient_norm(parts: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all elements of the (flat) parts together, 0-d fp64; there is at least one part.

    torch's CPU kernel adds all squares in a few fp32 sums, which loses 2 % of the norm at 124 million elements: rows of
    4,096 are exact to 1e-6, and their norms are added in fp64. CUDA's kernel adds in a tree.
    """
    norms: list[Tensor] = []
    for part in (piece for whole_part in parts for piece in _pieces(whole_part)):
        whole = 0 if part.is_cuda else part.numel() // NORM_ROW * NORM_ROW
        dtype = torch.promote_types(part.dtype, torch.float32)
        norms += [torch.linalg.vector_norm(part[:whole].view(-1, NORM_ROW), dim=1, dtype=dtype)] if whole else []
        norms += [torch.linalg.vector_norm(part[whole:], dtype=dtype).view(1)]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
    return norm


def _pieces(part: Tensor) -> Sequence[Tensor]:
    return part.split(WIDENED) if part.element_size() < 4 and not part.is_cuda else [part]
