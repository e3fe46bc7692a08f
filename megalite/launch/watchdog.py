"""Ends a job in which nothing goes on any more, and reports where each rank stands.

A collective that a rank does not join fails on the others, who know neither who it is nor what it does instead, and a
rank may hang without any collective. So two threads watch the main one. The first looks whether it makes progress and
talks to nobody. The second has a connection of its own to the store where the ranks met. The first rank whose patience
is at its end calls the roll there, and every rank that can still answer leaves what it does and where its code stands.
One of them writes the report, then all end. Ranks that do not answer are the report's most important line. Where all
answer that they do what may take longer (a save, start-up), they go on.

Nothing that may hang itself (the store, a disk, stderr) keeps a rank from ending REPORT_S + WRITE_S after its patience.
A process that was stopped as a whole (a suspended job, a laptop's lid) has not waited meanwhile: each look counts as
two intervals at most.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from megalite.errors.problems import to_stderr
from megalite.launch.context import ParallelContext
from megalite.launch.rendezvous import listed, wait_until

REPORT_S = 20.0  # from the end of the patience until the process ends, at most
ROLL_S = 5.0  # of these for the words of all ranks
WRITE_S = 2.0  # and for a report, whose disk may hang, too
LOOK_S = 2.0  # between two looks for a roll call, at most
READ_S = 1.0  # for the others to read a verdict, where the store lives in rank 0
HUNG = 1  # exit status
SAVES = 10  # times the patience: what a save may take
FRAMES = 4  # of a stack, in the report's summary
PACKAGE = str(Path(__file__).parents[1])


def after_report_s(patience_s: float) -> float:
    """The time-out of collectives. The watchdog speaks first: a collective that fails ends its rank before others can
    say where they stand."""
    return patience_s + 2 * REPORT_S


class Patience(NamedTuple):
    """How long nothing may go on."""

    setting: str  # that sets it
    seconds: float


class Doing(NamedTuple):
    """What a rank is at."""

    mark: object  # changes with any progress
    words: str
    may_take: float = 1.0  # times the patience, as long as all ranks answer


class Watchdog:
    """Context manager: meanwhile the calling thread must make progress.

    `doing` and `patience` are asked at each look. The report goes to stderr and into `folder`. `hosts`: where each rank
    runs. Does nothing in a world of one.
    """

    def __init__(
        self,
        context: ParallelContext,
        doing: Callable[[], Doing],
        patience: Callable[[], Patience],
        folder: Path,
        hosts: Sequence[str],
    ) -> None:
        self._context, self._doing, self._patience = context, doing, patience
        self._folder, self.hosts = folder, hosts
        self._watched, self._over = threading.get_ident(), threading.Event()
        self._idle_s, self._granted_s = 0.0, 0.0  # since the last progress; of it, what a slow disk may take
        targets = [] if context.store is None else [self._watch, self._answer_calls]
        self._threads = [threading.Thread(target=each, name="watchdog", daemon=True) for each in targets]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def follow(self, doing: Callable[[], Doing], patience: Callable[[], Patience]) -> None:
        """From now on, ask these."""
        self._doing, self._patience = doing, patience

    def __exit__(self, *_: object) -> None:
        """A thread that comes back from the store while Python ends would abort the process: they end before."""
        self._over.set()
        for thread in self._threads:
            thread.join(1.0)  # the host of the store may be gone

    stop = __exit__

    def _watch(self) -> None:
        before, looked = self._doing(), time.monotonic()
        while not self._over.wait(pause := min(1.0, self._patience().seconds / 20)):
            now, at = time.monotonic(), self._doing()
            self._idle_s += min(now - looked, 2 * pause)
            if at.mark != before.mark:
                self._idle_s = self._granted_s = 0.0
            before, looked = at, now
            if self._idle_s > self._granted_s + self._patience().seconds + REPORT_S:
                met = f"the place where the ranks met (rank 0 on {self.hosts[0]}, or its torchrun)"
                self._report(f"{met} does not answer", {self._context.rank: self._word()})
                self._exit()

    def _answer_calls(self) -> None:
        """Call the roll if nothing goes on for too long here; answer when one of the others does."""
        while not self._over.is_set():
            with suppress(DistError):  # where it stays so, `_watch` has the last word
                store: Store = self._context.store.clone()  # type: ignore[union-attr]  # not in torch's stubs
                while not self._over.wait(min(LOOK_S, self._patience().seconds / 20)):
                    call = int(store.compare_set("hang/call", "", "0"))  # the newest; 0: none yet
                    if call and not store.check([f"hang/{call}/verdict"]):
                        self._answer(store, f"hang/{call}")
                    elif self._idle_s > self._granted_s + self._patience().seconds:
                        store.compare_set("hang/call", str(call), str(call + 1))
            self._over.wait(LOOK_S)

    def _answer(self, store: Store, key: str) -> None:
        """Leave this rank's word; end, or go on, as the first one to answer has judged."""
        rank, verdict = self._context.rank, f"{key}/verdict"
        store.set(f"{key}/{rank}", json.dumps(self._word()))
        if store.add(f"{key}/words", 1) == 1:
            store.set(verdict, self._judge(store, key))
        with suppress(DistError):  # rank 0 has ended, and the store with it
            if wait_until(lambda: self._over.is_set() or store.check([verdict]), time.monotonic() + REPORT_S / 2):
                if self._over.is_set() or not store.get(verdict):
                    self._granted_s = self._idle_s
                    return
                time.sleep(READ_S if rank == 0 else 0.0)
        self._exit()

    def _judge(self, store: Store, key: str) -> str:
        """Wait for the words of all and report, with which ranks answer no more. Empty where all are at what may take
        longer, or where training ends meanwhile."""
        ranks, answered = range(self._context.world_size), partial(store.add, f"{key}/words", 0)
        wait_until(lambda: self._over.is_set() or answered() == len(ranks), time.monotonic() + ROLL_S)
        words = {at: json.loads(store.get(f"{key}/{at}")) for at in ranks if store.check([f"{key}/{at}"])}
        silent = [at for at in ranks if at not in words]
        if self._over.is_set() or not (silent or any(word["hangs"] for word in words.values())):
            return ""
        where = listed([*dict.fromkeys(self.hosts[rank] for rank in silent)])
        why = "stopped, gone with its host, or it holds Python's lock"
        finding = f"no answer from rank {listed(silent)} on {where}: {why}" if silent else "all ranks answer"
        told = self._report(finding, words)
        store.compare_set("failure/cause", "", told)  # the first rank to end breaks the collectives of others
        return finding

    def _word(self) -> dict[str, Any]:
        """What this rank does, and where its threads are."""
        names, doing = {thread.ident: thread.name for thread in threading.enumerate()}, self._doing()
        stacks = {names.get(ident, str(ident)): _lines(frame) for ident, frame in sys._current_frames().items()}
        main = _lines(sys._current_frames()[self._watched])
        own = [line for line in main if line.startswith("megalite/")] or main
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "doing": doing.words,
            "idle_s": round(self._idle_s, 1),
            "hangs": self._idle_s > doing.may_take * self._patience().seconds,
            "at": " < ".join(reversed(own[-FRAMES:])),
            "stacks": stacks | {"main": main},
        }

    def _report(self, finding: str, words: Mapping[int, Mapping[str, Any]]) -> str:
        """Write it to stderr, then all of it into a file; its first line. A thread of C ends the process where one of
        them hangs for WRITE_S."""
        setting, seconds = self._patience()
        first = f"no progress within {setting} ({seconds:g} s); {finding}"
        lines = [first, *summary(words), f"if a step may take so long: a larger {setting}"]
        path = self._folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-rank-{self._context.rank}.json"
        with open(os.devnull, "w") as nowhere, suppress(OSError):
            faulthandler.dump_traceback_later(WRITE_S, exit=True, file=nowhere)
            to_stderr("\n".join(f"megalite: {line}" for line in lines))
            with path.open("x", encoding="utf-8") as file:
                json.dump({"finding": finding, "ranks": words}, file, indent=1)
            to_stderr(f"megalite: all stacks: {path}")
        faulthandler.cancel_dump_traceback_later()
        return first

    def _exit(self) -> None:
        if not self._over.is_set():  # else it went on at the last moment
            os._exit(HUNG)  # the main thread will not


def summary(words: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A line for all ranks that do the same at the same place: those who differ from the rest come first."""
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, word in words.items():
        places[word["doing"], word["at"]].append(rank)
    lines = []
    for (doing, at), ranks in sorted(places.items(), key=lambda place: len(place[1])):
        who = listed([f"{rank} ({words[rank]['host']}, process {words[rank]['pid']})" for rank in ranks])
        idle_s = max(words[rank]["idle_s"] for rank in ranks)
        lines += [f"rank {who}: {doing}, for {idle_s:.0f} s", f"    at {at}"]
    return lines


def _lines(frame: FrameType) -> list[str]:
    """`megalite/train/loop.py:120 _launch`, innermost last. Reads no source files: their disk may be what hangs."""
    root = str(Path(PACKAGE).parent) + os.sep
    frames = [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
    return [f"{code.co_filename.removeprefix(root)}:{line} {code.co_name}" for code, line in reversed(frames)]
