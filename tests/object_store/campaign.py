"""A campaign of faults of an object store: a run uploads its checkpoints to a real S3 server that fails in some way,
then its machine is gone, and another folder goes on from what is there.

A trial holds if the run that met the fault trained on as if there was none: status 0, and records that equal, bit for
bit, those of a run without a store, as far as it came. A checkpoint that was told as uploaded is there, every file with
the hash in its manifest, unless the store itself has damaged it. The start elsewhere goes on from the newest checkpoint
that is whole there, comes to the end with status 0, has the undisturbed run's records, and leaves the store whole. What
is whole is judged by the few lines of `whole_steps`, on the server's own bytes.
"""

import json
import multiprocessing
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megalite.checkpoint import remote, uploads
from megalite.commands.train import main_to_the_end
from megalite.errors.problems import REFUSED
from megalite.train.history import EVENTS, read_events
from tests.faults.campaign import LAYOUTS, TRIES, TooLateError, _records, _starts, _undisturbed
from tests.faults.trial import STEPS, Trial
from tests.object_store.server import How, ObjectStore

PATIENCE_S, SHORT_S = 8.0, 2.0  # for the last upload, in trials
IN_FLIGHT_S = 1.5  # what the proxy has received before a kill reaches the server
Records = list[dict[str, Any]]


def impatient(words: list[str]) -> int:
    """The training as it is, in which minutes are seconds."""
    uploads.PATIENCE_S, uploads.SHORT_S, uploads.PAUSES_S = PATIENCE_S, SHORT_S, (0.1, 0.2, 0.5)  # type: ignore[assignment]
    uploads.LOOK_S, uploads.STANDSTILL_S, remote.PAUSE_S = 0.1, 5.0, 0.1
    return main_to_the_end(words)


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    fault: str
    flaws: list[str]  # empty: it holds
    saved: int = 0  # steps whose checkpoint was saved before the machine was gone
    uploaded: int = 0  # that were told as uploaded
    skipped: int = 0  # steps from the newest that was saved to that from which the start elsewhere went on


@dataclass
class Disturbed:
    """A trial and the store that it uploads to."""

    trial: Trial
    store: ObjectStore
    url: str
    over: bool = False

    @property
    def prefix(self) -> str:
        return self.url.partition("://")[2]

    def fails(self, how: How, *, methods: str = "*", keys: str = "*", **which: float) -> None:
        """From a random moment on requests fail so, for a while or until the run has ended."""
        dice = self.trial.dice
        self.trial.train_for_a_while()
        with self.store.failing(how, methods=methods, keys=f"{self.prefix}/{keys}", **which) as fault:
            self.trial.until(lambda: fault.struck > 0)
            time.sleep(dice.random() * 3 if dice.random() < 0.5 else 0)
            if dice.random() < 0.5:
                self.ends()
        if not fault.struck:
            raise TooLateError
        self.ends()

    def ends(self) -> None:
        """The run comes to its end, or is killed at a random moment before that; once."""
        if self.over:
            return
        self.over = True
        if self.trial.dice.random() < 0.3:
            time.sleep(self.trial.dice.random())
            self.trial.kill()
        elif any(statuses := self.trial.end()):
            raise ValueError(f"the run ended with {statuses}")


def _refuse(it: Disturbed) -> None:
    """Nobody listens, for a while or until the run has ended."""
    it.trial.train_for_a_while()
    with it.store.dead():
        time.sleep(it.trial.dice.random() * 3)
        if it.trial.dice.random() < 0.5:
            it.ends()
    it.ends()


def _kill_while_uploading(it: Disturbed) -> None:
    """All ranks, or the ranks of one machine, in the middle of a file's upload or between files."""
    it.trial.train_for_a_while()
    name = it.trial.dice.choice(
        ["rank-00000.safetensors", "rank-00001.safetensors", "state.json", "manifest.json", "*.jsonl"]
    )
    how: How = it.trial.dice.choice(["delay", "hang"])
    with it.store.failing(how, methods="PUT", keys=f"{it.prefix}/*{name}", seconds=1.0) as fault:
        it.trial.until(lambda: fault.struck > 0)
        time.sleep(it.trial.dice.random() * 0.2)
        it.trial.strike(signal.SIGKILL, everybody=True)
    if not fault.struck:
        raise TooLateError


def _stop_at_a_store_that_hangs(it: Disturbed) -> None:
    """SIGTERM to a rank: all end with status 0, soon."""
    it.trial.train_for_a_while()
    with it.store.failing("hang", keys=f"{it.prefix}/*"):
        time.sleep(it.trial.dice.random())
        it.trial.strike(signal.SIGTERM)
        begun = time.monotonic()
        if any(statuses := it.trial.end()):
            raise ValueError(f"SIGTERM to a rank ended them with {statuses}")
        if (took := time.monotonic() - begun) > SHORT_S + 15:
            raise ValueError(f"they took {took:.0f} s to end")


def _fail_at_the_restart(it: Disturbed) -> None:
    """The store fails while the start elsewhere reads, now and then or all the time; see `_again`."""
    it.ends()


FAULTS: dict[str, Callable[[Disturbed], None]] = {
    "refused": _refuse,
    "connections reset": lambda it: it.fails("refuse", times=it.trial.dice.choice([3, 30])),
    "slow": lambda it: it.fails("delay", seconds=0.2 + it.trial.dice.random()),
    "no answer": lambda it: it.fails("hang", methods=it.trial.dice.choice(["*", "PUT", "HEAD"])),
    "uploads cut": lambda it: it.fails("cut", methods="PUT", times=it.trial.dice.choice([2, 10, 100])),
    "uploads truncated": lambda it: it.fails("truncate", methods="PUT", times=it.trial.dice.choice([1, 2, 10])),
    "a bit flipped there": lambda it: it.fails("corrupt", methods="PUT", keys="checkpoints/*", times=1),
    "credentials gone": lambda it: it.fails(403),
    "errors 500 and 503": lambda it: it.fails(it.trial.dice.choice([500, 503]), times=it.trial.dice.choice([5, 50])),
    "killed while uploading": _kill_while_uploading,
    "stopped, no answer": _stop_at_a_store_that_hangs,
    "downloads fail": _fail_at_the_restart,
}
SILENT = ("uploads truncated", "a bit flipped there")  # the store has damaged what it has acknowledged


def campaign(store: ObjectStore, folder: Path, *, runs: int, seed: int) -> Iterator[Outcome]:
    """So many trials, each with the next fault and a random layout of two ranks. Failed ones leave their folder."""
    multiprocessing.set_forkserver_preload(["torch", __name__, "megalite.train.run", "megalite.prepare", "s3fs"])
    dice = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(" ".join(dice.choice(["tree", "river", "stone", "light"]) for _ in range(4000)))
    expected: dict[tuple[str, ...], Records] = {}
    for number in range(runs):
        fault, layout, own = [*FAULTS][number % len(FAULTS)], dice.choice(LAYOUTS), folder / f"trial-{number:04d}"
        shared = (*layout, f"data.path={folder / 'text.txt'}")
        if layout not in expected:
            undisturbed = Trial(impatient, folder / f"undisturbed-{len(expected)}", shared, dice, 2)
            expected[layout] = _undisturbed(undisturbed)
        url = store.url()
        arguments = (*shared, f"data.cache_dir={own / 'cache'}", f"checkpoint.remote={url}")
        trial = Trial(impatient, own, arguments, random.Random(dice.random()), 2, store.environment)
        outcome = _try(fault, Disturbed(trial, store, url), expected[layout])
        if not outcome.flaws:
            shutil.rmtree(own)
        yield outcome


def _try(fault: str, it: Disturbed, expected: Records) -> Outcome:
    try:
        _hurt(fault, it)
        events, own = read_events(it.trial.run / EVENTS), _records(it.trial.run)
        saved = [event["step"] for event in events if event["kind"] == "checkpoint"]
        told = [event["step"] for event in events if event["kind"] == "uploaded"]
        flaws = [] if own == expected[: len(own)] else ["the records of the run that met the fault differ"]
        time.sleep(IN_FLIGHT_S)
        whole, complete = whole_steps(it)
        if fault not in SILENT:  # what was told may have made room for a newer one, which nobody was left to tell
            newest = max(whole, default=0)
            flaws += [f"step {step} was uploaded, and {newest} is whole" for step in told[-1:] if step > newest]
            flaws += [f"step {step} is taken for whole and is not" for step in complete if step not in whole]
        return _again(fault, it, expected, Outcome(fault, flaws, max(saved, default=0), max(told, default=0)), whole)
    except Exception as error:  # the other trials go on
        return Outcome(fault, [f"{type(error).__name__}: {error}"])
    finally:
        it.trial.kill()


def _hurt(fault: str, it: Disturbed) -> None:
    """Start the run and strike, again if that came too late."""
    for _ in range(TRIES):
        shutil.rmtree(it.trial.folder, ignore_errors=True)
        it.trial.folder.mkdir()
        it.trial.arguments = [word for word in it.trial.arguments if not word.startswith("checkpoint.remote=")]
        it.url, it.over = it.store.url(), False
        it.trial.arguments.append(f"checkpoint.remote={it.url}")
        it.trial.start()
        with suppress(TooLateError):
            FAULTS[fault](it)
            it.trial.kill()
            return
        it.trial.kill()
    raise ValueError(f"it came too late {TRIES} times")


def _again(fault: str, it: Disturbed, expected: Records, before: Outcome, whole: list[int]) -> Outcome:
    """Go on in a new folder."""
    flaws, newest, folder, fails = [*before.flaws], max(whole, default=0), it.trial.folder / "elsewhere", False
    folder.mkdir()
    again = Trial(impatient, folder, it.trial.arguments, it.trial.dice, 2, it.store.environment)
    try:
        if fault == "downloads fail":
            how: How = it.trial.dice.choice(["cut", "truncate", "corrupt", 403, 500, "refuse"])
            fails = it.trial.dice.random() < 0.3
            times = float("inf") if fails else it.trial.dice.choice([1, 2])
            with it.store.failing(how, methods="GET", keys=f"{it.prefix}/checkpoints/*", times=times):
                again.start()
                statuses = again.end()
            if fails and newest and not set(statuses) <= {REFUSED}:
                flaws.append(f"{how} of all downloads ended a start with {statuses}")
        if not again.ranks or (fails and newest):
            again.start()
            statuses = again.end()
        flaws += [f"the start elsewhere ended with {statuses}"] if any(statuses) else []
        if (began := _starts(again.run)[-1:]) != [newest]:
            flaws.append(f"it went on from step {began}, and {newest} was the newest that was whole, of {whole}")
        flaws += [] if _records(again.run) == expected else ["its records differ from the undisturbed run's"]
        at_end, complete = whole_steps(it)
        said = f"the checkpoint of step {STEPS} is not uploaded" in (folder / "output.log").read_text(errors="replace")
        ends_well = (STEPS in at_end or said) and (at_end == complete or fault in SILENT)
        flaws += [] if ends_well else [f"{complete} are complete there, {at_end} whole"]
        return Outcome(fault, flaws, before.saved, before.uploaded, before.saved - newest)
    finally:
        again.kill()


def whole_steps(it: Disturbed) -> tuple[list[int], list[int]]:
    """The steps of which every file that a manifest there lists is there with its hash, and those with a manifest."""
    objects, whole, complete = it.store.contents(f"{it.prefix}/checkpoints/"), list[int](), list[int]()
    for name in sorted(objects):
        step, _, file = name.rpartition("/")
        if file == "manifest.json":
            complete.append(int(step[-8:]))
            with suppress(ValueError, KeyError):
                body, _, last = objects[name].rpartition(b'"hash": ')
                assert_equal(json.loads(last.rstrip(b"\n}")), body)
                for file, (_, expected) in json.loads(objects[name])["files"].items():
                    assert_equal(expected, objects[f"{step}/{file}"])
                whole.append(complete[-1])
    return whole, complete


def assert_equal(expected: str, content: bytes) -> None:
    if xxhash.xxh3_128(content).hexdigest() != expected:
        raise ValueError("another hash")


def table(outcomes: list[Outcome]) -> list[str]:
    """A row for each fault."""
    lines = ["| fault | trials | hold | uploaded before | steps behind the newest save, median (most) |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for fault in [*dict.fromkeys(outcome.fault for outcome in outcomes), "all"]:
        of_it = [outcome for outcome in outcomes if fault in (outcome.fault, "all")]
        good, some = sum(not each.flaws for each in of_it), sum(each.uploaded > 0 for each in of_it)
        behind = sorted(each.skipped for each in of_it)
        lines.append(f"| {fault} | {len(of_it)} | {good} | {some} | {behind[len(behind) // 2]} ({behind[-1]}) |")
    return lines
