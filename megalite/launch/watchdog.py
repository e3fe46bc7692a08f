"""Ends a job in which nothing goes on any more, and says where each rank stands.

A collective that a rank does not join fails on the others, who know neither who it is nor what it does instead, and a
rank may hang without any collective. So a thread of each rank watches its main thread. When half of the time is up
without progress it opens a connection of its own to the store where the ranks met. The first rank whose time is up
calls the roll there, and every rank that can still answer says what it does and where its code stands. One of them
writes the report, then all end. Ranks that do not answer are the report's most important line. Only where all answer
that they are in a save, whose disk may take its time, do they go on.

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
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d  # of the flight recorders torch has nothing public
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from megalite.errors.problems import to_stderr
from megalite.launch.context import ParallelContext
from megalite.launch.rendezvous import listed, wait_until

REPORT_S = 10.0  # from the end of the patience until the process ends, at most
HUNG = 1  # exit status
SAVING = "in a save"
FRAMES = 4  # of a stack, in the report's summary
PACKAGE = str(Path(__file__).parents[1])


class Watchdog:
    """Context manager: meanwhile the calling thread must make progress.

    `doing` gives what changes with any progress, and words for it; None in a save. `patience_s` is asked at each look.
    The report goes to stderr and into `folder`. `hosts`: where each rank runs. Does nothing in a world of one.
    """

    def __init__(
        self,
        context: ParallelContext,
        doing: Callable[[], tuple[object, str] | None],
        patience_s: Callable[[], float],
        folder: Path,
        hosts: Sequence[str],
    ) -> None:
        self._context, self._doing, self._patience_s = context, doing, patience_s
        self._folder, self._hosts = folder, hosts
        self._watched = threading.get_ident()
        self._over, self._idle_s = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._context.store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        """Looks often, and talks to nobody: that is the other thread's, which may wait for a host that is gone."""
        before, looked, talker = self._doing(), time.monotonic(), threading.Thread()
        while not self._over.wait(pause := min(1.0, self._patience_s() / 20)):
            now, at = time.monotonic(), self._doing()
            self._idle_s += min(now - looked, 2 * pause)
            if (at and at[0]) != (before and before[0]):
                self._idle_s = 0.0
            before, looked = at, now
            if self._idle_s > self._patience_s() / 2 and not talker.is_alive():
                talker = threading.Thread(target=self._talk, name="watchdog's words", daemon=True)
                talker.start()
            if self._idle_s > self._patience_s() + REPORT_S:
                met = f"rank 0 on {self._hosts[0]}, or its torchrun"
                finding = f"the place where the ranks met ({met}) does not answer"
                self._write(finding, {self._context.rank: self._word(None)})  # a recorder may be what hangs
                self._exit()

    def _talk(self) -> None:
        """Call the roll if nothing goes on for too long here; answer when one of the others does."""
        assert self._context.store is not None
        with suppress(DistError):  # then `_watch` has the last word
            store = self._context.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
            while (patience_s := self._patience_s()) < 2 * self._idle_s and not self._over.is_set():
                call = int(store.compare_set("hang/call", "", "0"))  # the newest; 0: none yet
                if call and not store.check([f"hang/{call}/verdict"]):
                    self._answer(store, call)
                elif self._idle_s > patience_s:
                    store.compare_set("hang/call", str(call), str(call + 1))
                time.sleep(min(0.5, patience_s / 20))

    def _answer(self, store: Store, call: int) -> None:
        """Leave this rank's word; end, or go on, as the first one to answer has judged."""
        rank, key = self._context.rank, f"hang/{call}"
        store.set(f"{key}/{rank}", json.dumps(self._word(_newest_collective())))
        if store.add(f"{key}/words", 1) == 1:
            store.set(f"{key}/verdict", self._judge(store, key))
        with suppress(DistError):  # rank 0 has ended, and the store with it
            if wait_until(lambda: store.check([f"{key}/verdict"]), time.monotonic() + REPORT_S):
                if not store.get(f"{key}/verdict"):
                    self._idle_s = 0.0
                    return
                time.sleep(1.0 if rank == 0 else 0.0)  # the store may live in this process: the others read, too
        self._exit()

    def _judge(self, store: Store, key: str) -> str:
        """Wait for the words of all and report; empty where all are in a save."""
        size, patience_s = self._context.world_size, self._patience_s()
        wait_until(lambda: store.add(f"{key}/words", 0) == size, time.monotonic() + REPORT_S / 2)
        words = {at: json.loads(store.get(f"{key}/{at}")) for at in range(size) if store.check([f"{key}/{at}"])}
        silent = [at for at in range(size) if at not in words]
        if not silent and all(word["doing"] == SAVING or word["idle_s"] < patience_s for word in words.values()):
            to_stderr(f"megalite: no progress for {patience_s:g} s, and all ranks answer: the disk of a save is slow")
            return ""
        finding = _silence(silent, self._hosts) if silent else "all ranks answer"
        self._write(finding, words)
        # For failure_report.py: the first rank to end breaks the collectives of others.
        store.compare_set("failure/cause", "", f"no progress within parallel.timeout_s; {finding}")
        return finding

    def _word(self, collective: str | None) -> dict[str, Any]:
        """What this rank does, and where its threads are."""
        frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
        doing = self._doing()
        stacks = {
            "main" if ident == self._watched else names.get(ident, str(ident)): _lines(traceback.extract_stack(frame))
            for ident, frame in frames.items()
            if not names.get(ident, "").startswith("watchdog")
        }
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "doing": doing[1] if doing else SAVING,
            "idle_s": round(self._idle_s, 1),
            "collective": collective,
            "stacks": stacks,
        }

    def _write(self, finding: str, words: Mapping[int, Mapping[str, Any]]) -> None:
        path = self._folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-rank-{self._context.rank}.json"
        told = [f"no progress within parallel.timeout_s; {finding}", *summary(words)]
        with suppress(OSError):
            path.write_text(json.dumps({"finding": finding, "ranks": words}, indent=1))
            told.append(f"all stacks: {path}")
        to_stderr("\n".join(f"megalite: {line}" for line in told))

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
        first = words[ranks[0]]
        newest = f"; newest collective: {collective}" if collective else ""
        who = f"rank {listed(ranks)} ({first['host']}, process {first['pid']})"
        lines.append(f"{who}: {doing}, for {first['idle_s']:.0f} s{newest}")
        lines.append(f"    at {where}")
    return lines


def _silence(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks[:8]))
    if len(ranks) > 1:
        why = "stopped, gone with their hosts, or they hold Python's lock"
        return f"no answer from ranks {listed(ranks)} on {where}: {why}"
    return f"no answer from rank {ranks[0]} on {where}: stopped, gone with its host, or it holds Python's lock"


def _lines(stack: traceback.StackSummary) -> list[str]:
    """`megalite/train/loop.py:120 _launch`, innermost last."""
    root = str(Path(PACKAGE).parent) + os.sep
    return [f"{frame.filename.removeprefix(root)}:{frame.lineno} {frame.name}" for frame in stack]


def _newest_collective() -> str:
    """The collective that this rank began last, by torch's flight recorders: NCCL's, and that of all else. Empty where
    they are switched off."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if dump := getattr(c10d, name, None):
            entries += json.loads(dump()).get("entries", [])
    if not entries:
        return ""
    newest = max(entries, key=lambda entry: entry["time_created_ns"])
    number = newest["p2p_seq_id" if newest["is_p2p"] else "collective_seq_id"]
    return f"{newest['profiling_name']} number {number} of group {newest['process_group'][1]}"
