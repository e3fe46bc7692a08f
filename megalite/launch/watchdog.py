"""Ends a job in which nothing goes on any more, and says where each rank stands.

A collective that a rank does not join fails on the others, who know neither who it is nor what it does instead, and a
rank may hang without any collective. So two threads watch the main one. The first looks whether it makes progress and
talks to nobody. The second has a connection of its own to the store where the ranks met. The first rank whose patience
is at its end calls the roll there, and every rank that can still answer says what it does and where its code stands.
One of them writes the report, then all end. Ranks that do not answer are the report's most important line. Where all
answer that they do what may take longer (a save, start-up), they go on.

Nothing that may hang itself (the store, a disk, stderr) keeps a rank from ending REPORT_S + WRITE_S after its patience.
A process that was stopped as a whole (a suspended job, a laptop's lid) has not waited meanwhile: each look counts as
two intervals at most.
"""

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

from torch._C import _distributed_c10d as c10d  # of the flight recorders torch has nothing public
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
SHOWN = 4  # ranks of a line
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
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._idle_s = 0.0  # since the last progress
        self._granted_s = 0.0  # of it, for a slow disk
        self._threads = [
            threading.Thread(target=target, name=f"watchdog's {name}", daemon=True)
            for target, name in ((self._watch, "eye"), (self._talk, "voice"))
        ]

    def __enter__(self) -> "Watchdog":
        if self._context.store is not None:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(self, doing: Callable[[], Doing], patience: Callable[[], Patience]) -> None:
        """From now on, ask these."""
        self._doing, self._patience = doing, patience

    def stop(self) -> None:
        """A thread that comes back from the store while Python ends would abort the process: they end before."""
        self._over.set()
        if self._context.store is not None:
            for thread in self._threads:
                thread.join(1.0)  # the host of the store may be gone

    def _watch(self) -> None:
        before, looked = self._doing(), time.monotonic()
        while not self._over.wait(pause := min(1.0, self._patience().seconds / 20)):
            now, at = time.monotonic(), self._doing()
            self._idle_s += min(now - looked, 2 * pause)
            if at.mark != before.mark:
                self._idle_s = self._granted_s = 0.0
            before, looked = at, now
            if self._idle_s > self._granted_s + self._patience().seconds + REPORT_S:
                met = f"rank 0 on {self.hosts[0]}, or its torchrun"
                finding = f"the place where the ranks met ({met}) does not answer"
                self._write(finding, {self._context.rank: self._word(None)})  # a recorder may be what hangs
                self._exit()

    def _talk(self) -> None:
        """Call the roll if nothing goes on for too long here; answer when one of the others does."""
        assert self._context.store is not None
        while not self._over.is_set():
            with suppress(DistError):  # where it stays so, `_watch` has the last word
                store = self._context.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
                while not self._over.wait(min(LOOK_S, self._patience().seconds / 20)):
                    call = int(store.compare_set("hang/call", "", "0"))  # the newest; 0: none yet
                    if call and not store.check([f"hang/{call}/verdict"]):
                        self._answer(store, call)
                    elif self._idle_s > self._granted_s + self._patience().seconds:
                        store.compare_set("hang/call", str(call), str(call + 1))
            self._over.wait(LOOK_S)

    def _answer(self, store: Store, call: int) -> None:
        """Leave this rank's word; end, or go on, as the first one to answer has judged."""
        rank, key = self._context.rank, f"hang/{call}"
        store.set(f"{key}/{rank}", json.dumps(self._word(_newest_collective())))
        if store.add(f"{key}/words", 1) == 1:
            store.set(f"{key}/verdict", self._judge(store, key))
        with suppress(DistError):  # rank 0 has ended, and the store with it
            judged = partial(store.check, [f"{key}/verdict"])
            if wait_until(lambda: self._over.is_set() or judged(), time.monotonic() + REPORT_S / 2):
                if self._over.is_set() or not store.get(f"{key}/verdict"):
                    self._granted_s = self._idle_s
                    return
                time.sleep(READ_S if rank == 0 else 0.0)
        self._exit()

    def _judge(self, store: Store, key: str) -> str:
        """Wait for the words of all and report; empty where all are at what may take longer, or where training ends
        meanwhile, with which ranks answer no more."""
        size = self._context.world_size
        answered = partial(store.add, f"{key}/words", 0)
        wait_until(lambda: self._over.is_set() or answered() == size, time.monotonic() + ROLL_S)
        if self._over.is_set():
            return ""
        words = {at: json.loads(store.get(f"{key}/{at}")) for at in range(size) if store.check([f"{key}/{at}"])}
        silent = [at for at in range(size) if at not in words]
        hung = [word for word in words.values() if word["hangs"]]
        if not silent and not hung:
            longest = max(words.values(), key=lambda word: float(word["idle_s"]))
            to_stderr(f"megalite: for {longest['idle_s']:.0f} s {longest['doing']}; all ranks answer: it goes on")
            return ""
        finding = _silence(silent, self.hosts) if silent else "all ranks answer"
        self._write(finding, words)
        # For failure_report.py: the first rank to end breaks the collectives of others.
        store.compare_set("failure/cause", "", f"{self._no_progress()}; {finding}")
        return finding

    def _no_progress(self) -> str:
        setting, seconds = self._patience()
        return f"no progress within {setting} ({seconds:g} s)"

    def _word(self, collective: str | None) -> dict[str, Any]:
        """What this rank does, and where its threads are."""
        frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
        doing = self._doing()
        stacks = {
            "main" if ident == self._watched else names.get(ident, str(ident)): _lines(frame)
            for ident, frame in frames.items()
            if not names.get(ident, "").startswith("watchdog")
        }
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "doing": doing.words,
            "idle_s": round(self._idle_s, 1),
            "hangs": self._idle_s > doing.may_take * self._patience().seconds,
            "collective": collective,
            "stacks": stacks,
        }

    def _write(self, finding: str, words: Mapping[int, Mapping[str, Any]]) -> None:
        """To stderr, then all of it into a file, if both let us within WRITE_S."""
        remedy = f"if a step may take so long: a larger {self._patience().setting}"
        told = [f"{self._no_progress()}; {finding}", *summary(words), remedy]
        path = self._folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-rank-{self._context.rank}.json"

        def write() -> None:
            to_stderr("\n".join(f"megalite: {line}" for line in told))
            with suppress(OSError):
                with path.open("x", encoding="utf-8") as file:
                    json.dump({"finding": finding, "ranks": words}, file, indent=1)
                to_stderr(f"megalite: all stacks: {path}")

        writer = threading.Thread(target=write, name="watchdog's hand", daemon=True)
        writer.start()
        writer.join(WRITE_S)

    def _exit(self) -> None:
        if not self._over.is_set():  # else it went on at the last moment
            os._exit(HUNG)  # the main thread will not


def summary(words: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A line for all ranks that do the same at the same place: those who differ from the rest stand out."""
    places: dict[tuple[str, str | None, str], list[int]] = defaultdict(list)
    for rank, word in words.items():
        stack = word["stacks"].get("main", [])
        own = [line for line in stack if line.startswith("megalite/")] or stack
        places[word["doing"], word["collective"], " < ".join(reversed(own[-FRAMES:]))].append(rank)
    lines = []
    for (doing, collective, where), ranks in sorted(places.items(), key=lambda place: len(place[1])):
        newest = f"; newest collective: {collective}" if collective else ""
        who = [f"{rank} ({words[rank]['host']}, process {words[rank]['pid']})" for rank in ranks[:SHOWN]]
        more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
        idle_s = max(words[rank]["idle_s"] for rank in ranks)
        lines.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(who)}{more}: {doing}, for {idle_s:.0f} s{newest}")
        lines.append(f"    at {where}")
    return lines


def _silence(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks[:8]))
    if len(ranks) > 1:
        why = "stopped, gone with their hosts, or they hold Python's lock"
        return f"no answer from ranks {listed(ranks)} on {where}: {why}"
    return f"no answer from rank {ranks[0]} on {where}: stopped, gone with its host, or it holds Python's lock"


def _lines(frame: FrameType) -> list[str]:
    """`megalite/train/loop.py:120 _launch`, innermost last. Reads no source files: their disk may be what hangs."""
    root, lines = str(Path(PACKAGE).parent) + os.sep, []
    for each, line in traceback.walk_stack(frame):
        lines.append(f"{each.f_code.co_filename.removeprefix(root)}:{line} {each.f_code.co_name}")
    return lines[::-1]


def _newest_collective() -> str:
    """The collective that this rank began last, by torch's flight recorders: NCCL's, and that of all else. Empty where
    they are switched off, or speak another language than the torch that this was written for."""
    entries: list[dict[str, Any]] = []
    try:
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            if dump := getattr(c10d, name, None):
                entries += json.loads(dump()).get("entries", [])
        if not entries:
            return ""
        newest = max(entries, key=lambda entry: entry["time_created_ns"])
        number = newest["p2p_seq_id" if newest["is_p2p"] else "collective_seq_id"]
    except Exception:  # the report matters more
        return ""
    return f"{newest['profiling_name']} number {number} of group {newest['process_group'][1]}"
