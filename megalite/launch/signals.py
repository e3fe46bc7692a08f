"""Turns stop signals into a request, which the loop reads at the end of a step.

SIGINT (Ctrl-C), SIGTERM (schedulers), SIGUSR1 (SLURM's --signal) and SIGHUP (the terminal is gone; ignored under nohup)
all mean: finish the step, write a checkpoint, exit with status 0. Launchers repeat signals, so a second one changes
nothing. The third Ctrl-C ends the process at once: as after a kill, the newest checkpoint is what counts. So does the
end of torchrun once a stop was asked for: its ranks live in sessions of their own, where a terminal's Ctrl-C does not
reach them, and a user who interrupts torchrun until it gives up means them, too. A time limit is one more such request.
"""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

LAUNCHER_ENDED = signal.SIGUSR2  # sent by the kernel; nobody else here uses it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, LAUNCHER_ENDED)
PATIENCE = 3  # interrupts until the process is ended without saving
INTERRUPTED = 130  # exit status, as shells have it
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_launcher(launcher: str) -> None:
    """Have the kernel send LAUNCHER_ENDED to this process when its torchrun dies (Linux only). Where no `StopRequest`
    listens, that ends the process."""
    if launcher == "torchrun" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(LAUNCHER_ENDED))


def ignore_stop_signals() -> None:
    """For a process that has saved and is about to end: a repeated signal must not spoil its status."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Context manager that turns stop signals into `requested`, the first one's name; so does the end of `within_s`
    seconds, which is called `limit`."""

    def __init__(self, within_s: float | None = None, limit: str = "") -> None:
        self.requested: str | None = None
        self._timer: threading.Timer | None = None
        if within_s is not None:
            self._timer = threading.Timer(max(0.0, within_s), self._ask, [limit])
            self._timer.daemon = True
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._previous_wakeup = self._wakeup = -1

    def __enter__(self) -> "StopRequest":
        received, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        threading.Thread(target=_end_when_impatient, args=(received,), name="signals", daemon=True).start()
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
                self._previous[number] = signal.signal(number, self._handle)
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._wakeup)  # ends the thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._ask("the end of torchrun" if number == LAUNCHER_ENDED else signal.Signals(number).name)

    def _ask(self, name: str) -> None:
        self.requested = self.requested or name


def _end_when_impatient(descriptor: int) -> None:
    """Count signals in a thread: Python's handlers run in the main thread, which may be inside an operation that never
    ends."""
    received: list[int] = []
    with open(descriptor, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            received += number
            # The kernel may tell of the launcher's end several times, once for each of its threads.
            abandoned = LAUNCHER_ENDED in received and received[0] != LAUNCHER_ENDED
            if abandoned or received.count(signal.SIGINT) >= PATIENCE:
                os._exit(INTERRUPTED)
