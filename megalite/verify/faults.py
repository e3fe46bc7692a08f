"""A fault campaign: a small run is hurt in some way, started once more, and must end as if nothing had happened.

A trial trains in a folder of its own with real ranks, strikes at a random moment, and starts the run again as a user or
scheduler would, with the same command. Then every recorded loss and gradient norm equals the undisturbed run's bit for
bit, every folder with the name of a checkpoint is whole, nothing unfinished is left, and no process is.

Ranks are forks of one server that has imported torch (a start takes a second); the campaign is their launcher.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from megalite.errors.problems import REFUSED
from megalite.train.history import EVENTS, METRICS, read_events, read_metrics
from megalite.verify.bit_flips import fault_of, flip

STEPS = 30
SETTINGS = (  # seconds of training, with a save every third step and everything that a resume has to carry on
    *(f"train.steps={STEPS}", "checkpoint.interval=3", "train.eval_interval=10", "train.eval_batches=1"),
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.dropout=0.1"),
    *("train.seq_length=32", "train.global_batch_size=8", "train.micro_batch_size=2", "train.sample_tokens=0"),
    *("tokenizer=byte", "device=cpu", "precision=fp32", "data=text", "log.wandb=disabled", "log.report_interval_s=0"),
    *("parallel.timeout_s=3", "parallel.startup_timeout_s=60", "train.check_replicas_every=10"),
)
LAYOUTS = ((), ("parallel.tp=2",), ("parallel.pp=2",), ("checkpoint.async=true",))  # one of them in each trial
RECORDED = ("step", "tokens", "loss", "grad_norm", "lr", "val_loss")
PATIENCE_S = 60.0
A_DAY_S = 86_400.0
SIZE_LIMIT = 40_000  # bytes of a file: records fit, the part of a checkpoint that a rank writes does not

Main = Callable[[list[str]], int]  # what a rank runs, given overrides: its exit status


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    fault: str
    flaws: list[str]  # empty: it holds
    steps_lost: int = 0  # trained on before the fault, and again
    recovery_s: float = 0.0  # from the restart until training was as far as before


@dataclass
class Trial:
    """One run that is hurt and goes on."""

    main: Main
    folder: Path
    arguments: Sequence[str]
    dice: random.Random
    world_size: int
    ranks: list[ForkServerProcess] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, *, size_limit: int | None = None, clock_shift_s: float = 0.0) -> None:
        """Start the ranks."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = {"WORLD_SIZE": str(self.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [*SETTINGS, *self.arguments, f"run_dir={self.run}"]
        context = multiprocessing.get_context("forkserver")
        self.ranks = []
        for rank in range(self.world_size):
            variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            arguments = (self.main, words, variables, self.folder / "output.log", size_limit, clock_shift_s)
            self.ranks.append(context.Process(target=_rank, args=arguments, daemon=True))
            self.ranks[-1].start()

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

    def strike(self, number: signal.Signals, everybody: bool = False) -> None:
        """A signal to a random rank, or to all."""
        for rank in self.ranks if everybody else [self.dice.choice(self.ranks)]:
            with suppress(ProcessLookupError):
                os.kill(rank.pid or 0, number)

    def end(self) -> list[int]:
        """Wait for the end of all ranks but stopped ones, which a launcher kills; their statuses."""
        deadline = time.monotonic() + PATIENCE_S
        while any(rank.is_alive() and not _is_stopped(rank.pid) for rank in self.ranks):
            if time.monotonic() > deadline:
                self.strike(signal.SIGKILL, everybody=True)
                raise TimeoutError(f"ranks do not end; see {self.folder / 'output.log'}")
            time.sleep(0.01)
        self.strike(signal.SIGKILL, everybody=True)
        for rank in self.ranks:
            rank.join()
        return [rank.exitcode or 0 for rank in self.ranks]


def _rank(
    main: Main, words: list[str], variables: Mapping[str, str], log: Path, size_limit: int | None, clock_shift_s: float
) -> None:
    os.environ.update(variables)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if size_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_limit, size_limit))
    if clock_shift_s:
        now = time.time
        time.time = lambda: now() + clock_shift_s
    status = main(words)
    sys.stdout.flush()
    os._exit(status)


def _is_stopped(pid: int | None) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


# --- faults ----------------------------------------------------------------------------------------------------------


def _kill(trial: Trial) -> None:
    trial.train_for_a_while()
    trial.strike(signal.SIGKILL)


def _kill_in_a_save(trial: Trial) -> None:
    trial.train_for_a_while()
    trial.until(lambda: any((trial.run / "checkpoints").glob(".tmp-step-*")))
    time.sleep(trial.dice.random() * 0.004)
    trial.strike(signal.SIGKILL, everybody=trial.dice.random() < 0.5)


def _terminate(trial: Trial) -> None:
    trial.train_for_a_while()
    trial.strike(signal.SIGTERM)


def _stand_still(trial: Trial) -> None:
    trial.train_for_a_while()
    trial.strike(signal.SIGSTOP)


def _truncate_newest(trial: Trial) -> None:
    path = _kill_all_after_two_saves(trial)
    os.truncate(path, trial.dice.randrange(path.stat().st_size))


def _flip_newest(trial: Trial) -> None:
    flip(_kill_all_after_two_saves(trial), trial.dice)


def _kill_all_after_two_saves(trial: Trial) -> Path:
    """Some file of the newest checkpoint; there is one before it."""
    saved: list[Path] = []
    while len(saved) < 2:  # where they are not yet, by the time that it is struck, the next start makes more
        if not any(rank.is_alive() for rank in trial.ranks):
            trial.start()
        _kill_all(trial)
        saved = _saved(trial)
    return trial.dice.choice(sorted(saved[-1].iterdir()))


def _full_disk(trial: Trial) -> None:
    """The limit of a file's size fails writes as a full disk does: a start with it trains and cannot save."""
    _kill_all(trial)
    saved = _saved(trial)
    trial.start(size_limit=SIZE_LIMIT)
    if 0 in trial.end() or _saved(trial) != saved:
        raise ValueError("a start that could not save did not say so")


def _damage_tokens(trial: Trial) -> None:
    """The next start is refused, or prepares them again; then they are put back."""
    _kill_all(trial)
    path = next((trial.folder / "cache").rglob("*.bin"))
    content = path.read_bytes()
    os.truncate(path, trial.dice.randrange(len(content)))
    trial.start()
    statuses = trial.end()
    if set(statuses) - {0, REFUSED}:
        raise ValueError(f"a damaged token file ended a start with {statuses}")
    path.write_bytes(content)


def _kill_all(trial: Trial) -> None:
    trial.train_for_a_while()
    trial.strike(signal.SIGKILL, everybody=True)
    trial.end()


def _saved(trial: Trial) -> list[Path]:
    return sorted((trial.run / "checkpoints").glob("step-????????"))


FAULTS: dict[str, Callable[[Trial], None]] = {
    "SIGKILL of a rank": _kill,
    "SIGKILL during a save": _kill_in_a_save,
    "SIGTERM to a rank": _terminate,
    "SIGSTOP of a rank": _stand_still,
    "newest checkpoint truncated": _truncate_newest,
    "a bit of it flipped": _flip_newest,
    "no room for a checkpoint": _full_disk,
    "token file truncated": _damage_tokens,
    "clock set back by a day": _kill_all,
}
CLOCK = "clock set back by a day"


# --- the campaign ----------------------------------------------------------------------------------------------------


def campaign(main: Main, folder: Path, *, runs: int, seed: int, world_size: int = 2) -> Iterator[Outcome]:
    """So many trials, each with the next fault and a random layout. Failed ones leave their folder."""
    multiprocessing.set_forkserver_preload(["torch", main.__module__, "megalite.train.run", "megalite.prepare"])
    dice = random.Random(seed)
    folder.mkdir(parents=True)
    words = [dice.choice(["tree", "river", "stone", "cloud", "light"]) for _ in range(4000)]
    (folder / "text.txt").write_text(" ".join(words))
    expected: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for number in range(runs):
        fault = [*FAULTS][number % len(FAULTS)]
        layout = dice.choice(LAYOUTS)
        own = folder / f"trial-{number:04d}"
        shared = (*layout, f"data.path={folder / 'text.txt'}")
        if layout not in expected:
            undisturbed = Trial(main, folder / f"undisturbed-{len(expected)}", shared, dice, world_size)
            expected[layout] = _undisturbed(undisturbed)
        trial = Trial(main, own, (*shared, f"data.cache_dir={own / 'cache'}"), random.Random(dice.random()), world_size)
        outcome = _try(fault, trial, expected[layout])
        if not outcome.flaws:
            shutil.rmtree(own)
        yield outcome


def _undisturbed(trial: Trial) -> list[dict[str, Any]]:
    trial.folder.mkdir()
    trial.arguments = (*trial.arguments, f"data.cache_dir={trial.folder / 'cache'}")
    trial.start()
    if any(statuses := trial.end()):
        raise ValueError(f"the undisturbed run ends with {statuses}; see {trial.folder / 'output.log'}")
    return _records(trial.run)


def _try(fault: str, trial: Trial, expected: list[dict[str, Any]]) -> Outcome:
    try:
        _hurt(fault, trial)
        reached, starts = trial.step(), len(_starts(trial.run))
        begun = time.monotonic()
        trial.start(clock_shift_s=-A_DAY_S if fault == CLOCK else 0.0)
        trial.until(lambda: len(_starts(trial.run)) > starts and trial.step() >= reached)
        recovery_s = time.monotonic() - begun
        statuses = trial.end()
    except (TimeoutError, ValueError) as error:
        trial.strike(signal.SIGKILL, everybody=True)
        return Outcome(fault, [str(error)])
    flaws = [f"the restart ended with {statuses}"] if any(statuses) else []
    flaws += [] if _records(trial.run) == expected else ["its records differ from the undisturbed run's"]
    flaws += _leftovers(trial)
    return Outcome(fault, flaws, max(0, reached - _starts(trial.run)[-1]), recovery_s)


def _hurt(fault: str, trial: Trial) -> None:
    """Start the trial and strike, again if it was over before."""
    struck = False
    while not struck:
        shutil.rmtree(trial.folder, ignore_errors=True)
        trial.folder.mkdir()
        trial.start()
        FAULTS[fault](trial)
        struck = any(trial.end()) or trial.step() < STEPS


def _starts(run: Path) -> list[int]:
    """The steps from which its starts went on."""
    return [event["step"] for event in read_events(run / EVENTS) if event["kind"] in ("start", "resume")]


def _records(run: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in RECORDED if name in line} for line in read_metrics(run / METRICS)]


def _leftovers(trial: Trial) -> list[str]:
    """What a run that has ended must not leave: processes, and folders that are neither whole nor set aside."""
    flaws = [f"process {rank.pid} is left" for rank in trial.ranks if rank.is_alive()]
    for path in sorted((trial.run / "checkpoints").iterdir()):
        if path.name.startswith("."):
            flaws.append(f"{path.name} is left")
        elif ".bad-" not in path.name and fault_of(path) is not None:
            flaws.append(f"{path.name}: {fault_of(path)}")
    last = trial.run / "checkpoints" / f"step-{STEPS:08d}"
    return flaws if last in _saved(trial) else [*flaws, "the last step is not saved"]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A row for each fault."""
    lines = ["| fault | trials | as if undisturbed | steps lost, median (most) | recovery, median (most) |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for fault in dict.fromkeys(outcome.fault for outcome in outcomes):
        of_it = [outcome for outcome in outcomes if outcome.fault == fault]
        lost, took = [each.steps_lost for each in of_it], [each.recovery_s for each in of_it]
        good = sum(not each.flaws for each in of_it)
        steps = f"{statistics.median(lost):g} ({max(lost)})"
        times = f"{statistics.median(took):.1f} s ({max(took):.1f} s)"
        lines.append(f"| {fault} | {len(of_it)} | {good} | {steps} | {times} |")
    good = sum(not outcome.flaws for outcome in outcomes)
    return [*lines, f"| all | {len(outcomes)} | {good} | | |"]
