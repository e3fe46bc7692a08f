"""Pieces of a training state copied to host memory, so that the training may change them while the copies are written.

On a CPU the copies are ordinary memory, free again when the last of them is let go. On CUDA they are pinned (a copy to
other memory would hold up the host), allocated once and used again; a stream of its own copies, and the training's
stream waits for it on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalite.checkpoint.pieces import Piece

_ALIGNMENT = 64  # bytes: every copy starts on a cache line, and at a multiple of any element's size
_BLOCK = 1 << 30  # bytes; a power of two, to which torch rounds pinned memory up


class HostCopies:
    """Copies of one rank's pieces, as `device` needs them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: list[Tensor] = []  # blocks of bytes
        self._side: torch.cuda.Stream | None = None

    @torch.no_grad()
    def of(self, pieces: Sequence[Piece]) -> tuple[list[Piece], Callable[[], None]]:
        """The pieces with tensors in host memory, and a call that returns when these are filled.

        On CUDA the copies of the call before must be done with: they are overwritten. What the caller puts on the
        current stream from now on may change the pieces.
        """
        places, sizes = _places(pieces)
        if self._device.type != "cuda":
            copies = _carved(pieces, places, [torch.empty(size, dtype=torch.uint8) for size in sizes])
            for piece, copy in zip(pieces, copies, strict=True):
                copy.tensor.copy_(piece.tensor)
            return copies, lambda: None
        if [block.numel() for block in self._pinned] != sizes:
            self._pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        copies = _carved(pieces, places, self._pinned)
        training = torch.cuda.current_stream(self._device)
        self._side = self._side or torch.cuda.Stream(self._device)
        self._side.wait_stream(training)  # the state is complete when its last kernel is
        with torch.cuda.stream(self._side):
            for piece, copy in zip(pieces, copies, strict=True):
                copy.tensor.copy_(piece.tensor, non_blocking=True)
        copied = self._side.record_event()
        training.wait_event(copied)
        return copies, copied.synchronize


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _places(pieces: Sequence[Piece]) -> tuple[list[tuple[int, int]], list[int]]:
    """Block and first byte of each piece, one after the other, and the blocks' sizes; a large piece has its own."""
    places: list[tuple[int, int]] = []
    sizes: list[int] = []
    for piece in pieces:
        size = _padded(piece.tensor)
        if not sizes or sizes[-1] + size > _BLOCK:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    return places, sizes


def _carved(pieces: Sequence[Piece], places: Sequence[tuple[int, int]], blocks: Sequence[Tensor]) -> list[Piece]:
    """Pieces like these, contiguous, at their places in `blocks`."""
    carved = []
    for piece, (block, start) in zip(pieces, places, strict=True):
        data = blocks[block][start : start + piece.tensor.nbytes]
        carved.append(replace(piece, tensor=data.view(piece.tensor.dtype).view(piece.tensor.shape)))
    return carved
