"""A fault campaign: a small run is hurt in some way, started once more, and must end as if nothing had happened.

A trial trains in a folder of its own with real ranks, strikes at a random moment, and starts the run again as a user or
scheduler would, with the same command. Then every recorded loss and gradient norm equals the undisturbed run's bit for
bit, every folder with the name of a checkpoint is whole, nothing unfinished is left, and no process is.

trial.py starts the ranks.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.reading import inspect
from megalite.errors.problems import REFUSED
from megalite.launch.context import ParallelContext
from megalite.launch.watchdog import REPORT_S
from megalite.train.history import EVENTS, METRICS, read_events, read_metrics
from tests.faults.trial import STEPS, TIMEOUT_S, Main, Trial

LAYOUTS = ((), ("parallel.tp=2",), ("parallel.pp=2",), ("checkpoint.async=true",))  # one of them in each trial
RECORDED = ("step", "tokens", "loss", "grad_norm", "lr", "val_loss")
TRIES = 5  # of a fault that came too late
SIZE_LIMIT = 40_000  # bytes of a file: records fit, the part of a checkpoint that a rank writes does not


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    fault: str
    flaws: list[str]  # empty: it holds
    steps_lost: int = 0  # trained on before the fault, and again
    recovery_s: float = 0.0  # from the restart until training was as far as before


class TooLateError(Exception):
    """The fault did not strike what it was meant to; after another start it may."""


# --- damage to files ----------------------------------------------------------------------------------------------


def truncate(path: Path, dice: random.Random) -> None:
    """Cut a file at a random place."""
    os.truncate(path, dice.randrange(path.stat().st_size))


def flip(path: Path, dice: random.Random) -> None:
    """Flip one random bit of a file."""
    with path.open("r+b") as file:
        at = dice.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << dice.randrange(8)]))


def fault_of(checkpoint: Path) -> str | None:
    """What a start finds wrong with one checkpoint; None: it is whole."""
    found = inspect(checkpoint, ParallelContext())
    return found if isinstance(found, str) else None


def flip_bits(checkpoint: Path, flips: int, seed: int) -> list[str]:
    """Flip random bits over all files of a copy of a checkpoint, one at a time; those that a start would not notice."""
    dice, unnoticed = random.Random(seed), []
    copy = checkpoint.parent / "flipped" / checkpoint.name
    shutil.copytree(checkpoint, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    for number in range(flips):
        path = files[number % len(files)]
        content = path.read_bytes()
        flip(path, dice)
        if fault_of(copy) is None:
            unnoticed.append(f"flip {number}, in {path.name}")
        path.write_bytes(content)
    shutil.rmtree(copy.parent)
    return unnoticed


# --- faults ----------------------------------------------------------------------------------------------------------


def _kill(trial: Trial) -> None:
    """One rank while it trains, or all at any moment since the start of the processes, of a first or a later start."""
    if trial.dice.random() < 0.5:
        trial.train_for_a_while()
        _end_by_sigkill(trial, everybody=False)
        return
    if trial.dice.random() < 0.5:
        _kill_all(trial)
        trial.start()
    time.sleep(trial.dice.random() * trial.lasts_s)
    _end_by_sigkill(trial)


def _kill_in_a_save(trial: Trial) -> None:
    def saving() -> bool:
        return any((trial.run / "checkpoints").glob(".tmp-step-*"))

    trial.train_for_a_while()
    trial.until(saving)
    time.sleep(trial.dice.random() * 0.004)
    trial.strike(signal.SIGKILL, everybody=trial.dice.random() < 0.5)
    if not saving():
        raise TooLateError


def _terminate(trial: Trial) -> None:
    """All ranks save the step that they are in, and end with status 0."""
    trial.train_for_a_while()
    trial.strike(signal.SIGTERM)
    statuses, step = trial.end(), trial.step()
    if step == STEPS:
        raise TooLateError
    if any(statuses):
        raise ValueError(f"SIGTERM to a rank ended them with {statuses}")
    if not (trial.run / "checkpoints" / f"step-{step:08d}").exists():
        raise ValueError(f"after SIGTERM step {step} was recorded, but not saved")


def _stand_still(trial: Trial) -> None:
    """The others say in time who stands still."""
    trial.train_for_a_while()
    rank, found = trial.strike(signal.SIGSTOP), list[str]()
    deadline = time.monotonic() + TIMEOUT_S + REPORT_S + 5
    while not found and trial.step() < STEPS:
        if time.monotonic() > deadline:
            raise ValueError(f"nobody reported that rank {rank} stood still")
        time.sleep(0.05)
        with suppress(json.JSONDecodeError):  # it is being written
            found = [json.loads(path.read_text())["finding"] for path in (trial.run / "logs").glob("hang-*.json")]
    if not found:
        raise TooLateError
    if f"rank {rank} on " not in found[0]:
        raise ValueError(f"rank {rank} stood still, but it was reported: {found[0]}")


def _kill_all_after_two_saves(trial: Trial) -> Path:
    """Some file of the newest checkpoint; there is one before it."""
    for _ in range(TRIES):  # where they are not yet, by the time that it is struck, the next start makes more
        if not any(rank.is_alive() for rank in trial.ranks):
            trial.start()
        _kill_all(trial)
        if len(saved := _saved(trial)) > 1:
            return trial.dice.choice(sorted(saved[-1].iterdir()))
    raise TooLateError


def _full_disk(trial: Trial) -> None:
    """The limit of a file's size fails writes as a full disk does: a start with it trains and cannot save."""
    _kill_all(trial)
    saved = _saved(trial)
    trial.start(size_limit=SIZE_LIMIT)
    if 0 in trial.end() or _saved(trial) != saved:
        raise ValueError("a start that could not save did not say so")


def _damage_tokens(trial: Trial) -> None:
    """The next start is refused, or comes to the end as if nothing had happened; then they are put back."""
    _kill_all(trial)
    files = (trial.folder / "cache" / "tokens").iterdir()
    path = trial.dice.choice(sorted(path for path in files if path.suffix in (".bin", ".idx", ".json")))
    content = path.read_bytes()
    trial.dice.choice([truncate, flip])(path, trial.dice)
    trial.start()
    statuses = trial.end()
    if set(statuses) - {0, REFUSED}:
        raise ValueError(f"{path.name}, damaged, ended a start with {statuses}")
    path.write_bytes(content)


def _kill_all(trial: Trial) -> None:
    trial.train_for_a_while()
    _end_by_sigkill(trial)


def _end_by_sigkill(trial: Trial, *, everybody: bool = True) -> None:
    trial.strike(signal.SIGKILL, everybody)
    if not any(trial.end()):
        raise TooLateError


def _saved(trial: Trial) -> list[Path]:
    return sorted((trial.run / "checkpoints").glob("step-????????"))


FAULTS: dict[str, Callable[[Trial], None]] = {
    "SIGKILL of a rank": _kill,
    "SIGKILL during a save": _kill_in_a_save,
    "SIGTERM to a rank": _terminate,
    "SIGSTOP of a rank": _stand_still,
    "newest checkpoint truncated": lambda trial: truncate(_kill_all_after_two_saves(trial), trial.dice),
    "a bit of it flipped": lambda trial: flip(_kill_all_after_two_saves(trial), trial.dice),
    "no room for a checkpoint": _full_disk,
    "token file damaged": _damage_tokens,
}


# --- the campaign ----------------------------------------------------------------------------------------------------


def campaign(main: Main, folder: Path, *, runs: int, seed: int, world_size: int = 2) -> Iterator[Outcome]:
    """So many trials, each with the next fault and a random layout. Failed ones leave their folder."""
    multiprocessing.set_forkserver_preload(["torch", main.__module__, "megalite.train.run", "megalite.prepare"])
    dice = random.Random(seed)
    folder.mkdir(parents=True)
    words = [dice.choice(["tree", "river", "stone", "cloud", "light"]) for _ in range(4000)]
    (folder / "text.txt").write_text(" ".join(words))
    expected: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    lasts_s: dict[tuple[str, ...], float] = {}
    for number in range(runs):
        fault = [*FAULTS][number % len(FAULTS)]
        layout = dice.choice(LAYOUTS)
        own = folder / f"trial-{number:04d}"
        shared = (*layout, f"data.path={folder / 'text.txt'}")
        if layout not in expected:
            undisturbed = Trial(main, folder / f"undisturbed-{len(expected)}", shared, dice, world_size)
            begun = time.monotonic()
            expected[layout] = _undisturbed(undisturbed)
            lasts_s[layout] = time.monotonic() - begun
        arguments = (*shared, f"data.cache_dir={own / 'cache'}")
        trial = Trial(main, own, arguments, random.Random(dice.random()), world_size, lasts_s=lasts_s[layout])
        outcome = _try(fault, trial, expected[layout])
        if not outcome.flaws:
            shutil.rmtree(own)
        yield outcome


def _undisturbed(trial: Trial) -> list[dict[str, Any]]:
    trial.folder.mkdir()
    trial.arguments = (*trial.arguments, f"data.cache_dir={trial.folder / 'cache'}")
    try:
        trial.start()
        if any(statuses := trial.end()):
            raise ValueError(f"the undisturbed run ends with {statuses}; see {trial.folder / 'output.log'}")
    finally:
        trial.kill()
    return _records(trial.run)


def _try(fault: str, trial: Trial, expected: list[dict[str, Any]]) -> Outcome:
    try:
        _hurt(fault, trial)
        reached, starts = trial.step(), len(_starts(trial.run))
        begun = time.monotonic()
        trial.start()
        trial.until(lambda: len(_starts(trial.run)) > starts and trial.step() >= reached)
        recovery_s = time.monotonic() - begun
        statuses = trial.end()
        flaws = [f"the restart ended with {statuses}"] if any(statuses) else []
        flaws += [] if _records(trial.run) == expected else ["its records differ from the undisturbed run's"]
        flaws += _leftovers(trial)
        resumed = _starts(trial.run)[starts:] or [reached]  # a run that had ended does not go on
        return Outcome(fault, flaws, max(0, reached - resumed[-1]), recovery_s)
    except Exception as error:  # the other trials go on
        return Outcome(fault, [f"{type(error).__name__}: {error}"])
    finally:
        trial.kill()


def _hurt(fault: str, trial: Trial) -> None:
    """Start the trial and strike, again if that came too late."""
    for _ in range(TRIES):
        shutil.rmtree(trial.folder, ignore_errors=True)
        trial.folder.mkdir()
        trial.start()
        with suppress(TooLateError):
            FAULTS[fault](trial)
            trial.end()
            return
        trial.kill()
    raise ValueError(f"it came too late {TRIES} times")


def _starts(run: Path) -> list[int]:
    """The steps from which its starts went on."""
    return [event["step"] for event in read_events(run / EVENTS) if event["kind"] in ("start", "resume")]


def _records(run: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in RECORDED if name in line} for line in read_metrics(run / METRICS)]


def _leftovers(trial: Trial) -> list[str]:
    """What a run that has ended must not leave: processes, and folders that are neither whole nor set aside."""
    flaws = [f"process {pid} is left" for pid in trial.left]
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
