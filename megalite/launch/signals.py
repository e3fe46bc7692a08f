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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Self

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


@contextmanager
def _handlers(
    handle: Handler, count: Callable[[list[int]], None], numbers: Iterable[int] = STOP_SIGNALS
) -> Iterator[None]:
    """Meanwhile `handle` gets stop signals in the main thread. `count` gets all that came, in another one: the main
    thread may be inside an operation that never ends. An ignored SIGHUP (nohup) stays ignored."""

    def listen() -> None:
        received: list[int] = []
        with open(descriptor, "rb", buffering=0) as source:
            while number := source.read(1):
                received += number
                count(received)

    descriptor, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    threading.Thread(target=listen, name="signals", daemon=True).start()
    previous_wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    chosen = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in chosen}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(wakeup)  # ends the thread


class StartUp:
    """Context manager of a process that does not train yet: a stop signal ends it at once, in one line, with status 128
    and the signal's number. A `StopRequest` takes its place.

    The main thread unwinds, so that nothing is left half made. Where it is in what does not come back within UNWIND_S,
    the other thread ends the process.
    """

    now: "StartUp | None" = None  # that of this process

    def __init__(self, *, speaks: bool) -> None:
        self._speaks, self._began, self._stack = speaks, time.monotonic(), ExitStack()
        self.ends = False  # by a signal

    def __enter__(self) -> Self:
        StartUp.now = self
        self._stack.enter_context(_handlers(self._handle, self._count, {*STOP_SIGNALS} - {LAUNCHER_ENDED}))
        return self

    def __exit__(self, *_: object) -> None:
        StartUp.now = None
        self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.ends = True
        ignore_stop_signals()  # launchers repeat them
        sys.unraisablehook = lambda _: None  # in a destructor Python only prints the exception; `_count` has its turn
        self._say(number)
        raise SystemExit(128 + number)

    def _count(self, received: list[int]) -> None:
        time.sleep(UNWIND_S)
        if self.ends or signal.getsignal(received[0]) == self._handle:  # else a `StopRequest` has taken it
            self._say(received[0])
            os._exit(128 + received[0])

    def _say(self, number: int) -> None:
        if self._speaks:
            name, seconds = signal.Signals(number).name, time.monotonic() - self._began
            to_stderr(f"megalite: ended by {name} after {seconds:.0f} s of start-up, before the first step")
        self._speaks = False


class StopRequest:
    """Context manager that turns stop signals into `requested`, the first one's name; so does the end of `within_s`
    seconds, which is called `limit`."""

    def __init__(self, within_s: float | None = None, limit: str = "") -> None:
        self.requested: str | None = None
        self._within_s, self._limit, self._stack = within_s, limit, ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_handlers(self._handle, self._count))
        if self._within_s is not None:
            timer = threading.Timer(max(0.0, self._within_s), self._ask, [self._limit])
            timer.daemon = True
            timer.start()
            self._stack.callback(timer.cancel)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if StartUp.now is not None:
            StartUp.now.__exit__()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._ask("the end of torchrun" if number == LAUNCHER_ENDED else signal.Signals(number).name)

    def _ask(self, name: str) -> None:
        self.requested = self.requested or name

    def _count(self, received: list[int]) -> None:
        # The kernel may send the launcher's end several times, once for each of its threads.
        abandoned = LAUNCHER_ENDED in received and received[0] != LAUNCHER_ENDED
        if abandoned or received.count(signal.SIGINT) >= PATIENCE:
            os._exit(INTERRUPTED)
