"""One run of the fault campaign (campaign.py), which is its launcher.

Ranks are forks of one server that has imported torch: a start takes a second. Each leads a session, by which whatever
it starts is found when it has ended.
"""

import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from megalite.train.history import METRICS, read_metrics

STEPS = 30
TIMEOUT_S = 3.0
SETTINGS = (  # seconds of training, with a save every third step and everything that a resume has to carry on
    *(f"train.steps={STEPS}", "checkpoint.interval=3", "train.eval_interval=10", "train.eval_batches=1"),
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.dropout=0.1"),
    *("train.seq_length=32", "train.global_batch_size=8", "train.micro_batch_size=2", "train.sample_tokens=0"),
    *("tokenizer=byte", "device=cpu", "precision=fp32", "data=text", "log.wandb=disabled", "log.report_interval_s=0"),
    *(f"parallel.timeout_s={TIMEOUT_S}", "parallel.startup_timeout_s=60", "train.check_replicas_every=10"),
)
PATIENCE_S = 60.0
PARTING_S = 5.0  # what a rank has started may take so long to notice its end

Main = Callable[[list[str]], int]  # what a rank runs, given overrides: its exit status


@dataclass
class Trial:
    """One run that is hurt and goes on."""

    main: Main
    folder: Path
    arguments: Sequence[str]
    dice: random.Random
    world_size: int
    variables: Mapping[str, str] = field(default_factory=dict)  # of the ranks' environment, beside their places
    lasts_s: float = 0.0  # an undisturbed run, from the start of its processes to their end
    ranks: list[ForkServerProcess] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # processes that outlived the rank that had started them

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, *, size_limit: int | None = None) -> None:
        """Start the ranks."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = {"WORLD_SIZE": str(self.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [*SETTINGS, *self.arguments, f"run_dir={self.run}"]
        context = multiprocessing.get_context("forkserver")
        self.ranks = []
        for rank in range(self.world_size):
            variables = {**self.variables, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            arguments = (self.main, words, variables, self.folder / "output.log", size_limit)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            self.ranks.append(process)

    def step(self) -> int:
        """The newest that is recorded."""
        return max((record["step"] for record in read_metrics(self.run / METRICS)), default=0)

    def train_for_a_while(self) -> None:
        """Return at a random moment between the first step and the last."""
        step = self.dice.randrange(1, STEPS - 2)
        self.until(lambda: self.step() >= step)
        time.sleep(self.dice.random() * 0.05)

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when it is so, or all ranks have ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition() and any(rank.is_alive() for rank in self.ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happens any more; see {self.folder / 'output.log'}")
            time.sleep(0.002)

    def strike(self, number: signal.Signals, everybody: bool = False) -> int:
        """A signal to a random rank, which is returned, or to all."""
        struck = self.dice.randrange(self.world_size)
        for rank in self.ranks if everybody else [self.ranks[struck]]:
            if rank.pid and rank.is_alive():
                os.kill(rank.pid, number)
        return struck

    def end(self) -> list[int]:
        """Wait for the end of all ranks but stopped ones, which a launcher kills; their statuses."""
        deadline = time.monotonic() + PATIENCE_S
        while any(rank.is_alive() and not _is_stopped(rank.pid) for rank in self.ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks do not end; see {self.folder / 'output.log'}")
            time.sleep(0.01)
        deadline = time.monotonic() + PARTING_S
        while (left := self.children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.left += left
        return self.kill()

    def kill(self) -> list[int]:
        """End whatever is there; the ranks' statuses."""
        for pid in self.children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.strike(signal.SIGKILL, everybody=True)
        for rank in self.ranks:
            rank.join()
        return [rank.exitcode or 0 for rank in self.ranks]

    def children(self) -> list[int]:
        """Processes of the ranks' sessions that are not ranks."""
        sessions, found = {str(rank.pid) for rank in self.ranks}, []
        for folder in Path("/proc").glob("[0-9]*"):
            state = _state(int(folder.name))
            if state and state[3] in sessions and folder.name not in sessions and state[0] != "Z":
                found.append(int(folder.name))
        return found


def _rank(main: Main, words: list[str], variables: Mapping[str, str], log: Path, size_limit: int | None) -> None:
    os.setsid()
    os.environ.update(variables)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if size_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_limit, size_limit))
    status = main(words)
    sys.stdout.flush()
    os._exit(status)


def _is_stopped(pid: int | None) -> bool:
    return _state(pid)[:1] == ["T"]


def _state(pid: int | None) -> list[str]:
    """What /proc says of a process: its state (R, S, T, ...), parent, group and session; empty if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    return []
