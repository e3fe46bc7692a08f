"""Saves behind the training: the pieces are copied to host memory, and a thread writes the copies.

Training waits for the copy alone, and on CUDA only before the next update. The thread's collectives use a group of
their own ("saving"), so they never meet those of the training. One save at a time: its owner asks for the `result` of
one before it begins the next. The thread is a daemon, so the process can exit without it.

On a CPU the copies are ordinary memory, freed when the write is over. On CUDA they are pinned (a copy to other memory
would hold up the host), as many bytes as the pieces have, allocated once and used again. A stream of its own copies
while the next forward and backward run, which do not modify saved tensors. Code that does must call `before_change`
first: then the training's stream waits for the copies on the device.
"""

import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.store import Saved
from megalite.launch.context import ParallelContext

Write = Callable[[Sequence[Piece], ParallelContext], Saved]
ALIGNMENT = 256  # bytes, of the copies on CUDA


class BackgroundSaves:
    """Begins saves on one rank. All ranks begin the same ones, in the same order."""

    def __init__(self, context: ParallelContext) -> None:
        alone = context.control_group is None
        self._context = context if alone else replace(context, control_group=context.group("saving"))
        self._device = context.device
        self._pinned: list[Tensor] = []  # the copies on CUDA, which are used again
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reading: torch.cuda.Event | None = None  # until it has happened the pieces must stay as they are

    def begin(self, pieces: Sequence[Piece], write: Write, *, begun: float) -> "Future[Saved]":
        """Copy the pieces and have `write(copies, context)` called in a thread. `begun`: see `Saved.stall_s`.

        The future is of this rank: others may still be at their part when it is done. Its CheckpointErrors are the
        same on all ranks.
        """
        copies, wait = self.copies_of(pieces)
        stall_s = time.perf_counter() - begun
        saving: Future[Saved] = Future()

        def work() -> None:
            try:
                if self._side is not None:
                    torch.cuda.set_device(self._device)  # a new thread starts on the first one
                wait()
                saved = write(copies, self._context)
            except BaseException as error:
                cause: BaseException | None = error
                while cause is not None:  # keep the lines of the trace, and let go of the copies that its frames hold
                    traceback.clear_frames(cause.__traceback__)
                    cause = cause.__cause__ or cause.__context__
                copies.clear()
                saving.set_exception(error)
            else:
                copies.clear()  # before anybody can see that it is over
                saving.set_result(replace(saved, seconds=time.perf_counter() - begun, stall_s=stall_s))

        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        return saving

    @torch.no_grad()
    def copies_of(self, pieces: Sequence[Piece]) -> tuple[list[Piece], Callable[[], None]]:
        """The pieces with contiguous tensors in host memory, and a call that returns when these are filled.

        On CUDA the pieces have the same shapes every time, and the copies of the call before must be done with: they
        are overwritten. The pieces may change after `before_change`.
        """
        live, wait = [piece.tensor for piece in pieces], lambda: None
        if self._side is None:
            copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in live]
        else:
            self._pinned = copies = self._pinned or self._pin(live)
            self._side.wait_stream(torch.cuda.current_stream(self._device))  # whose kernels complete the state
            with torch.cuda.stream(self._side):
                for copy, tensor in zip(copies, live, strict=True):
                    copy.copy_(tensor, non_blocking=True)
            self._reading = self._side.record_event()
            wait = self._reading.synchronize
        return [replace(piece, tensor=copy) for piece, copy in zip(pieces, copies, strict=True)], wait

    def _pin(self, live: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors of the same shapes in one block, pinned as it is: what torch pins itself has powers of two
        bytes. They are valid as long as this object."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in live]
        block, cudart = torch.empty(sum(sizes), dtype=torch.uint8), torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
        # Memory that is freed while CUDA holds it for pinned gives wrong numbers to whoever copies there next.
        weakref.finalize(self, lambda block: cudart.cudaHostUnregister(block.data_ptr()), block).atexit = False
        parts = zip(block.split(sizes), live, strict=True)
        return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in parts]

    def before_change(self) -> None:
        """What is put on the current stream from now on may change the pieces of the last save."""
        if self._reading is not None:
            torch.cuda.current_stream(self._device).wait_event(self._reading)
            self._reading = None
