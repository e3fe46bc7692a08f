"""Turns stop signals into a request, which the loop reads at the end of a step. Before the first one they end a start.

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
import time
from collections.abc import Callable, Iterable
from types import FrameType

from megalite.errors.problems import to_stderr

Handler = Callable[[int, FrameType | None], None]

LAUNCHER_ENDED = signal.SIGUSR2  # sent by the kernel; nobody else here uses it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, LAUNCHER_ENDED)
UNWIND_S = 2.0
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


class _Handlers:
    """Handlers of signals, until `restore`. A thread, too, is told of each signal, whatever the main thread is in: it
    calls `listen` with a descriptor from which it reads their numbers."""

    def __init__(self, numbers: Iterable[signal.Signals], handle: Handler, listen: Callable[[int], None]) -> None:
        received, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        threading.Thread(target=listen, args=(received,), name="signals", daemon=True).start()
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, handle) for number in numbers}

    def restore(self) -> None:
        """What was before; calling it again does nothing."""
        if self._previous:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._wakeup)  # ends the thread
            self._previous = {}


class StartUp:
    """Context manager of a process that does not train yet: a stop signal ends it at once, in one line, with status 128
    and the signal's number. A `StopRequest` is its end.

    The main thread unwinds, so that nothing is left half made. Where it is in what does not come back within UNWIND_S,
    another thread ends the process. A Ctrl-C that ends a process without a launcher ends it without a word.
    """

    now: "StartUp | None" = None  # that of this process

    def __init__(self, *, speaks: bool, launched: bool) -> None:
        self._speaks, self._launched, self._began = speaks, launched, time.monotonic()
        self._handlers: _Handlers | None = None
        self.ends = False  # by a signal

    def __enter__(self) -> "StartUp":
        numbers = [each for each in STOP_SIGNALS if each != LAUNCHER_ENDED and signal.getsignal(each) != signal.SIG_IGN]
        StartUp.now, self._handlers = self, _Handlers(numbers, self._handle, self._end_in_time)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handlers is not None, "entered"
        self._handlers.restore()
        StartUp.now = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.ends = True
        ignore_stop_signals()  # launchers repeat them
        sys.unraisablehook = _nothing  # in a destructor Python only tells of the exception, and the thread has its turn
        self._say(number)
        raise SystemExit(128 + number)

    def _say(self, number: int) -> None:
        if self._speaks and (self._launched or number != signal.SIGINT):
            name, seconds = signal.Signals(number).name, time.monotonic() - self._began
            to_stderr(f"megalite: ended by {name} after {seconds:.0f} s of start-up, before the first step")
        self._speaks = False

    def _end_in_time(self, descriptor: int) -> None:
        with open(descriptor, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                time.sleep(UNWIND_S)
                if self.ends or signal.getsignal(number[0]) == self._handle:  # else somebody else has taken it
                    self._say(number[0])
                    os._exit(128 + number[0])


class StopRequest:
    """Context manager that turns stop signals into `requested`, the first one's name; so does the end of `within_s`
    seconds, which is called `limit`."""

    def __init__(self, within_s: float | None = None, limit: str = "") -> None:
        self.requested: str | None = None
        self._timer: threading.Timer | None = None
        if within_s is not None:
            self._timer = threading.Timer(max(0.0, within_s), self._ask, [limit])
            self._timer.daemon = True
        self._handlers: _Handlers | None = None

    def __enter__(self) -> "StopRequest":
        numbers = [each for each in STOP_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        self._handlers = _Handlers(numbers, self._handle, _end_when_impatient)  # under nohup SIGHUP is ignored
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._handlers is not None, "entered"
        self._handlers.restore()
        if StartUp.now is not None:
            StartUp.now.__exit__()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._ask("the end of torchrun" if number == LAUNCHER_ENDED else signal.Signals(number).name)

    def _ask(self, name: str) -> None:
        self.requested = self.requested or name


def _nothing(_: object) -> None:
    """Tell of no exception that Python ignores."""


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
