"""Saves behind the training: the pieces are copied to host memory, and a thread writes the copies.

Training waits for the copy alone. The thread's collectives use a group of its own ("saving"), so they never meet those
of the training. One save at a time: its owner asks for the `result` of one before it begins the next. The thread is a
daemon, so it does not hold up an end in which nobody waits for it.

On a CPU the copies are ordinary memory, freed when the write is over. On CUDA they are pinned (a copy to other memory
would hold up the host), allocated once and used again; a stream of its own copies, and the training's stream waits for
it on the device.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain

import torch

from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.store import Saved
from megalite.launch.context import ParallelContext

Write = Callable[[Sequence[Piece], ParallelContext], Saved]

_ALIGNMENT = 64  # bytes: every copy starts on a cache line, and at a multiple of any element's size
_BLOCK = 1 << 30  # bytes; a power of two, to which torch rounds pinned memory up


class BackgroundSaves:
    """Begins saves on one rank. All ranks begin the same ones, in the same order."""

    def __init__(self, context: ParallelContext) -> None:
        alone = context.control_group is None
        self._context = context if alone else replace(context, control_group=context.group("saving"))
        self._copies = HostCopies(context.device)

    def begin(self, pieces: Sequence[Piece], write: Write, *, begun: float) -> "Future[Saved]":
        """Copy the pieces and have `write(copies, context)` called in a thread. `begun`: see `Saved.stall_s`.

        The future is of this rank: others may still be at their part when it is done. Its CheckpointErrors are the
        same on all ranks.
        """
        copies, wait = self._copies.of(pieces)
        saving: Future[Saved] = Future()
        arguments = (saving, copies, wait, write, self._context, begun)
        threading.Thread(target=_save, args=arguments, name="checkpoint", daemon=True).start()
        return saving


def _save(
    saving: "Future[Saved]",
    copies: list[Piece],
    wait: Callable[[], None],
    write: Write,
    context: ParallelContext,
    begun: float,
) -> None:
    """The thread. The copies are let go before anybody can see that it is over."""
    try:
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)  # a new thread starts on the first one
        wait()
        stall_s = time.perf_counter() - begun
        saved = replace(write(copies, context), seconds=time.perf_counter() - begun, stall_s=stall_s)
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:  # keep the lines of the trace, and let go of the copies that its frames hold
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        copies.clear()
        saving.set_exception(error)
    else:
        copies.clear()
        saving.set_result(saved)


class HostCopies:
    """Copies of one rank's pieces in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: list[Piece] = []  # the copies on CUDA, which are used again
        self._side: torch.cuda.Stream | None = None

    @torch.no_grad()
    def of(self, pieces: Sequence[Piece]) -> tuple[list[Piece], Callable[[], None]]:
        """The pieces with tensors in host memory, and a call that returns when these are filled.

        On CUDA the pieces have the same shapes every time, and the copies of the call before must be done with: they
        are overwritten. What the caller puts on the current stream from now on may change the pieces.
        """
        if self._device.type != "cuda":
            copies = _empty_like(pieces, pin_memory=False)
            _copy(pieces, copies)
            return copies, lambda: None
        self._pinned = copies = self._pinned or _empty_like(pieces, pin_memory=True)
        training = torch.cuda.current_stream(self._device)
        self._side = self._side or torch.cuda.Stream(self._device)
        self._side.wait_stream(training)  # the state is complete when its last kernel is
        with torch.cuda.stream(self._side):
            _copy(pieces, copies)
        copied = self._side.record_event()
        training.wait_event(copied)
        return [*copies], copied.synchronize


def _copy(pieces: Sequence[Piece], copies: Sequence[Piece]) -> None:
    for piece, copy in zip(pieces, copies, strict=True):
        copy.tensor.copy_(piece.tensor, non_blocking=True)


def _empty_like(pieces: Sequence[Piece], *, pin_memory: bool) -> list[Piece]:
    """Contiguous pieces in host memory, one after the other in blocks of memory; a large piece has its own block."""
    blocks: list[list[int]] = []  # bytes of each piece in it
    for piece in pieces:
        size = -(-piece.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not blocks or sum(blocks[-1]) + size > _BLOCK:
            blocks.append([])
        blocks[-1].append(size)
    memory = [torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin_memory).split(sizes) for sizes in blocks]
    places = [(piece, data[: piece.tensor.nbytes]) for piece, data in zip(pieces, chain(*memory), strict=True)]
    return [replace(it, tensor=data.view(it.tensor.dtype).view(it.tensor.shape)) for it, data in places]
