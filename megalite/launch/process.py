"""What a rank's process is in the job, and how it ends. No torch import.

SIGINT (Ctrl-C), SIGTERM (schedulers), SIGUSR1 (SLURM's --signal) and SIGHUP (the terminal is gone; ignored under nohup)
mean the same. A process that does not train yet ends at once. One that trains finishes the step, writes a checkpoint
and exits with status 0. Launchers repeat signals, so a second one changes nothing. The third Ctrl-C ends the process
without a save: as after a kill, the newest checkpoint is what counts. So does the end of torchrun after a stop signal:
its ranks live in sessions of their own, where a terminal's Ctrl-C does not reach them.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

from megalite.errors.problems import to_stderr

LOOPBACK = "127.0.0.1"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
LAUNCHER_ENDED = signal.SIGUSR2  # sent by the kernel; nobody else here uses it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, LAUNCHER_ENDED)
UNWIND_S = 2.0
PATIENCE = 3  # interrupts until the process is ended without saving
PR_SET_PDEATHSIG = 1  # linux/prctl.h
INTERRUPTED = 130  # exit status, as shells have it
Launcher = Literal["single", "torchrun", "env", "slurm"]


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of one process among all. `local_rank` is None where the launcher does not set it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    launcher: Launcher = "single"
    threads: int | None = None  # of torch on the CPU; None: as many as torch or the user has chosen
    job_began: int | None = None  # seconds since 1970; None: no batch script has said it


def is_loopback(host: str) -> bool:
    """Whether the address reaches no other machine."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next step. Else it returns large or last pieces to the system, which
    clears each page anew: 2 % to 10 % of a step. The price: sizes that change leave gaps in the heap."""
    words = " ".join([*os.environ, os.environ.get("GLIBC_TUNABLES", "")])
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not re.search("malloc[._](trim|mmap|top_pad)", words, re.IGNORECASE):
        mallopt(M_MMAP_MAX, 0)  # large pieces from the heap, too
        mallopt(M_TRIM_THRESHOLD, -1)  # and the heap is never cut


def end_compile_workers() -> None:
    """Kill inductor's compile workers, where there are any: when Python ends torch asks them to, and waits for up to
    five minutes for some that do not hear it (pytorch#162199)."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    pools = [pool for pool in getattr(inductor, "_pool_set", ()) if hasattr(pool, "process")]
    for pool in [pool for pool in pools if pool.process.poll() is None]:
        pool.running = False  # else a thread tells of an end that it did not expect
        if pool.timer:
            pool.timer.quit()
        children = Path(f"/proc/{pool.process.pid}/task/{pool.process.pid}/children")
        for pid in (pool.process.pid, *(children.read_text(encoding="ascii").split() if children.exists() else ())):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    if pools:
        inductor.after_fork()  # forgets them: whoever compiles again has new ones


def die_with_launcher(launcher: str) -> None:
    """Have the kernel send LAUNCHER_ENDED to this process when its torchrun dies (Linux only)."""
    if launcher == "torchrun" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(LAUNCHER_ENDED))


def ignore_stop_signals() -> None:
    """For a process that has saved and is about to end: a repeated signal must not spoil its status."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """Context manager that receives the stop signals of this process. While it is `starting`, the first one ends the
    process in one line, with status 128 and the signal's number; later it is only `requested`, by name. A thread
    receives the signals as well, because the main one may be inside an operation that does not come back."""

    now: "StopSignals | None" = None  # of this process

    def __init__(self, *, speaks: bool = False) -> None:
        self.starting, self.ended = True, False  # ended: by a signal, while it was starting
        self.requested: str | None = None
        self._speaks, self._began = speaks, time.monotonic()

    def __enter__(self) -> Self:
        StopSignals.now, (source, self._wakeup) = self, os.pipe()
        os.set_blocking(self._wakeup, False)
        threading.Thread(target=self._listen, args=[source], name="signals", daemon=True).start()
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # nohup
        self._before = {number: signal.signal(number, self._handle) for number in {*STOP_SIGNALS} - ignored}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._wakeup)  # ends the thread
        StopSignals.now = None

    def ask(self, name: str) -> None:
        """Request a stop, as a signal would."""
        self.requested = self.requested or name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.starting:
            return self.ask(_name(number))
        self.ended = True
        ignore_stop_signals()
        sys.unraisablehook = lambda _: None  # in a destructor Python only prints the exception; `_listen` ends it
        raise SystemExit(self._status(number))  # unwinds, so that nothing is left half made

    def _listen(self, descriptor: int) -> None:
        received: list[int] = []
        with open(descriptor, "rb", buffering=0) as source:
            while number := source.read(1):
                received += number
                if self.starting:
                    time.sleep(UNWIND_S)
                    if self.starting:
                        os._exit(self._status(received[0]))
                # The kernel may send the launcher's end several times, once for each of its threads.
                abandoned = LAUNCHER_ENDED in received and received[0] != LAUNCHER_ENDED
                if abandoned or received.count(signal.SIGINT) >= PATIENCE:
                    os._exit(INTERRUPTED)

    def _status(self, number: int) -> int:
        """The exit status of a start that a signal ends, which is said once."""
        if self._speaks:
            seconds = time.monotonic() - self._began
            to_stderr(f"megalite: ended by {_name(number)} after {seconds:.0f} s of start-up, before the first step")
        self._speaks = False
        return 128 + number


@contextmanager
def stop_request(within_s: float | None = None, limit: str = "") -> Iterator[StopSignals]:
    """From now on a signal only asks for a stop; so does the end of `within_s` seconds, under the name `limit`."""
    with nullcontext(StopSignals.now) if StopSignals.now else StopSignals() as signals:
        signals.starting = False
        timer = threading.Timer(max(0.0, within_s or 0.0), signals.ask, [limit])
        timer.daemon = True
        if within_s is not None:
            timer.start()
        yield signals
        timer.cancel()


def _name(number: int) -> str:
    return "the end of torchrun" if number == LAUNCHER_ENDED else signal.Signals(number).name
