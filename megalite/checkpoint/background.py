"""A save behind the training: the pieces are copied to host memory, a thread writes the copies.

Training waits for the copy alone. The thread's collectives use a group of its own ("saving"), so they never meet those
of the training; nothing that it reads changes after the copy. One save at a time: its owner asks for the `result` of
one before it begins the next. The thread is a daemon: it does not hold up an end in which nobody waits for it.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megalite.checkpoint.host_copies import HostCopies
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.store import Saved
from megalite.parallel.context import ParallelContext

Write = Callable[[Sequence[Piece], ParallelContext], Saved]


class BackgroundSaves:
    """Begins saves on one rank. All ranks begin the same ones, in the same order."""

    def __init__(self, context: ParallelContext) -> None:
        alone = context.control_group is None
        self._context = context if alone else replace(context, control_group=context.group("saving"))
        self._copies = HostCopies(context.device)

    def begin(self, pieces: Sequence[Piece], write: Write, *, begun: float) -> "PendingSave":
        """Copy the pieces and have `write(copies, context)` called in a thread. `begun`: see `Saved.stall_s`."""
        copies, wait = self._copies.of(pieces)
        return PendingSave(copies, wait, write, self._context, begun)


class PendingSave:
    """One save under way."""

    def __init__(
        self, copies: list[Piece], wait: Callable[[], None], write: Write, context: ParallelContext, begun: float
    ) -> None:
        self._saved: Saved | None = None
        self._error: Exception | None = None
        arguments = (copies, wait, write, context, begun)  # not kept: the copies go when the thread ends
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank's part is over; other ranks may still be at theirs."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for the end; whether it came."""
        self._thread.join(timeout_s)
        return self.done()

    def result(self) -> Saved:
        """Wait for the end; what `write` returned, or its exception. CheckpointErrors are the same on all ranks."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def _run(
        self, copies: list[Piece], wait: Callable[[], None], write: Write, context: ParallelContext, begun: float
    ) -> None:
        try:
            if context.device.type == "cuda":
                torch.cuda.set_device(context.device)  # a new thread starts on the first one
            wait()
            stall_s = time.perf_counter() - begun
            saved = write(copies, context)
            self._saved = replace(saved, seconds=time.perf_counter() - begun, stall_s=stall_s)
        except Exception as error:
            _forget_locals(error)
            self._error = error
        finally:
            del copies  # this frame, too, is part of an error's trace


def _forget_locals(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold (the copies), until somebody asks for the result; keep their lines."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
