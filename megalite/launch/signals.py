"""Turns stop signals into a request, which the loop reads at the end of a step.

SIGINT (Ctrl-C), SIGTERM (schedulers), SIGUSR1 (SLURM's --signal) and SIGHUP (the terminal is gone; ignored under nohup)
all mean: finish the step, write a checkpoint, exit with status 0. Launchers repeat signals, so a second one changes
nothing. The third Ctrl-C ends the process at once. So does the end of torchrun once a stop was asked for: its ranks
live in sessions of their own, where a terminal's Ctrl-C does not reach them, and a user who interrupts torchrun until
it gives up means them, too.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

LAUNCHER_ENDED = signal.SIGUSR2  # sent by the kernel; nobody else here uses it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, LAUNCHER_ENDED)
PATIENCE = 3  # interrupts until the process is ended without saving
GRACE_S = 2.0  # then, for an orderly end
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
    """Context manager that turns stop signals into `requested`.

    A thread counts the signals: Python's handlers run in the main thread only, which may be inside a long operation, or
    in one that never ends.
    """

    def __init__(self) -> None:
        self.requested: str | None = None  # the first signal's name
        self._impatient = False
        self._left = threading.Event()
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._previous_wakeup = self._wakeup = -1

    def __enter__(self) -> "StopRequest":
        received, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        threading.Thread(target=self._watch, args=(received,), name="signals", daemon=True).start()
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._wakeup)  # ends the thread
        self._left.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._impatient:
            self._impatient = False  # once: what cleans up is not to be interrupted as well
            raise KeyboardInterrupt
        name = "the end of torchrun" if number == LAUNCHER_ENDED else signal.Signals(number).name
        self.requested = self.requested or name

    def _watch(self, descriptor: int) -> None:
        """Read the numbers of signals as they come; end the process when patience does."""
        received: list[int] = []
        with open(descriptor, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                received += number
                # The kernel may tell of the launcher's end several times, once for each of its threads.
                abandoned = LAUNCHER_ENDED in received and received[0] != LAUNCHER_ENDED
                if abandoned or received.count(signal.SIGINT) >= PATIENCE:
                    self._end()
                    break

    def _end(self) -> None:
        """Interrupt the main thread; if that does not bring it here in time, end the process without it."""
        self._impatient = True
        main = threading.main_thread().ident
        assert main is not None
        deadline = time.monotonic() + GRACE_S
        while not self._left.wait(0.05):
            if self._impatient:  # again and again: one that comes just before a wait begins does not end the wait
                signal.pthread_kill(main, signal.SIGINT)
            if time.monotonic() > deadline:
                os._exit(INTERRUPTED)
