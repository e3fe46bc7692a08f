"""Stopping on request: the handler only sets a flag, the loop reads it at the end of a step.

SIGINT (Ctrl-C), SIGTERM (schedulers) and SIGUSR1 (SLURM's --signal) all mean: finish the step, write a checkpoint, exit
with status 0. Launchers repeat signals (a terminal's Ctrl-C reaches a worker directly and again through torchrun), so a
second one changes nothing; from the third Ctrl-C on, the process is interrupted at once.
"""

import signal
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PATIENCE = 3  # interrupts until the process is ended without saving


class StopRequest:
    """Context manager that turns stop signals into `requested`."""

    def __init__(self) -> None:
        self.requested: str | None = None  # the first signal's name
        self._interrupts = 0
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= PATIENCE:
            raise KeyboardInterrupt
