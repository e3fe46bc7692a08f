"""Ends a job in which nothing goes on any more, and finds out which rank ended one.

A collective that a rank does not join fails on the others, who know neither which rank it is nor where it stands, and a
rank may hang without any collective. So two threads watch the main one: one counts the time without progress, the other
speaks over a connection of its own to the store where the ranks met. The first rank to lose patience calls the roll
there; all that can answer leave their place in the code; one writes the report; all end, or go on if all answer from
slow phases (a save, start-up). Where even the store hangs, a rank ends REPORT_S + WRITE_S after its time-out.
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
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from megalite.errors.problems import to_stderr
from megalite.launch.context import ParallelContext, answers, listed, pauses

REPORT_S = 20.0  # from the end of the patience until the process ends, at most
ROLL_S = 5.0  # of these for the words of all ranks
WRITE_S = 2.0  # and for a report, whose disk may hang, too
ALERT_S = 5.0  # for the user's alert, which begins before the report
LOOK_S = 2.0  # between two looks for a roll call, at most
READ_S = 1.0  # for the others to read a verdict, where the store lives in rank 0
CAUSE_S = 3.0  # for the words of all ranks after a failure
SAVES = 10  # times the patience: what a save may take
FRAMES = 4  # of a stack, in the report's summary
ROOT = f"{Path(__file__).parents[2]}{os.sep}"


def after_report_s(timeout_s: float) -> float:
    """The time-out of collectives. The watchdog speaks first: a collective that fails ends its rank before others can
    say where they stand."""
    return timeout_s + 2 * REPORT_S


class Doing(NamedTuple):
    """A rank's place in its work, and how long it may stay there."""

    mark: object  # changes with any progress
    words: str
    setting: str  # that sets the next field
    timeout_s: float
    may_take: float = 1.0  # times `timeout_s`, as long as all ranks answer


class Watchdog:
    """Context manager: meanwhile the calling thread must make progress, which `doing` tells at each look; in a world of
    one nobody watches. The report goes to stderr and into `folder`, its first line to `alert`. `hosts`: where each rank
    runs."""

    def __init__(
        self,
        context: ParallelContext,
        doing: Callable[[], Doing],
        folder: Path,
        hosts: Sequence[str],
        alert: Callable[[str], object] = lambda first: None,
    ) -> None:
        self.doing, self._context, self._folder, self._hosts = doing, context, folder, hosts
        self._alert, self._alerting = alert, threading.Thread()
        self._watched, self._over = threading.get_ident(), threading.Event()
        self._idle_s, self._excused_s = 0.0, 0.0  # since the last progress; of that, excused by a verdict
        targets = [] if context.store is None else [self._watch, self._answer_calls]
        self._threads = [threading.Thread(target=each, name="watchdog", daemon=True) for each in targets]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """A thread that comes back from the store while Python ends would abort the process: they end before."""
        self._over.set()
        for thread in self._threads:
            thread.join(1.0)  # the host of the store may be gone
        self._let_alert_end()  # another rank has ended first, and broken a collective of the main thread

    stop = __exit__

    def _watch(self) -> None:
        """Count the time without progress, but not that in which the whole process is stopped (a suspended job)."""
        before, looked = self.doing(), time.monotonic()
        while not self._over.wait(pause := min(1.0, before.timeout_s / 20)):
            now, at = time.monotonic(), self.doing()
            self._idle_s += min(now - looked, 2 * pause)
            if at.mark != before.mark:
                self._idle_s = self._excused_s = 0.0
            before, looked = at, now
            if self._idle_s > self._excused_s + at.timeout_s + REPORT_S:
                met = f"the place where the ranks met (rank 0 on {self._hosts[0]}, or its torchrun)"
                if self._hosts[self._context.rank] in self._hosts[self._context.rank + 1 :]:
                    self._alert = lambda first: None  # each host's last rank does: all report
                self._report(f"{met} does not answer", {self._context.rank: self._word()})
                self._exit()

    def _answer_calls(self) -> None:
        """Call the roll if nothing goes on for too long here; answer when another rank does."""
        while not self._over.is_set():
            with suppress(DistError):  # where it stays so, `_watch` has the last word
                store: Store = self._context.store.clone()  # type: ignore[union-attr]  # not in torch's stubs
                while not self._over.wait(min(LOOK_S, (timeout_s := self.doing().timeout_s) / 20)):
                    call = int(store.compare_set("hang/call", "", "0"))  # the newest; 0: none yet
                    if call and not store.check([f"hang/{call}/verdict"]):
                        self._answer(store, PrefixStore(f"hang/{call}", store))
                    elif self._idle_s > self._excused_s + timeout_s:
                        store.compare_set("hang/call", str(call), str(call + 1))
            self._over.wait(LOOK_S)

    def _answer(self, store: Store, roll: Store) -> None:
        """Leave this rank's word. The first rank to answer waits for all words and judges; then all end, or go on."""
        rank, over, finding = self._context.rank, self._over.is_set, ""
        roll.set(str(rank), json.dumps(self._word()))
        if roll.add("answers", 1) == 1:
            words = answers(roll, range(self._context.world_size), ROLL_S, over)
            if silent := [at for at in range(self._context.world_size) if at not in words]:
                where = listed([*dict.fromkeys(self._hosts[at] for at in silent)])
                why = "stopped, gone with its host, or it holds Python's lock"
                finding = f"no answer from rank {listed(silent)} on {where}: {why}"
            elif any(word["hangs"] for word in words.values()):
                finding = "all ranks answer"
            finding = "" if over() else finding
            if finding:
                store.compare_set("failure/cause", "", self._report(finding, words))
            roll.set("verdict", finding)
        with suppress(DistError):  # rank 0 has ended, and the store with it
            if any(over() or roll.check(["verdict"]) for _ in pauses(REPORT_S / 2)):
                if over() or not roll.get("verdict"):
                    self._excused_s = self._idle_s
                    return
                time.sleep(READ_S if rank == 0 else 0.0)
        self._exit()

    def _word(self) -> dict[str, Any]:
        """This rank's doing, and where its threads are."""
        names, doing = {thread.ident: thread.name for thread in threading.enumerate()}, self.doing()
        stacks = {names.get(ident, str(ident)): _lines(frame) for ident, frame in sys._current_frames().items()}
        main = stacks[names[self._watched]]
        own = [line for line in main if line.startswith("megalite/")] or main
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "doing": doing.words,
            "idle_s": round(self._idle_s, 1),
            "hangs": self._idle_s > doing.may_take * doing.timeout_s,
            "at": " < ".join(reversed(own[-FRAMES:])),
            "stacks": stacks,
        }

    def _report(self, finding: str, words: Mapping[int, Mapping[str, Any]]) -> str:
        """Write it to stderr, then all of it into a file, unless one of them hangs; its first line."""
        setting, timeout_s = self.doing()[2:4]
        first = f"no progress within {setting} ({timeout_s:g} s); {finding}"
        self._alerting = threading.Thread(target=self._alert, args=[first], daemon=True)
        self._alerting.start()
        path = self._folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-rank-{self._context.rank}.json"

        def write() -> None:
            lines = [first, *summary(words), f"if a step may take so long: a larger {setting}"]
            to_stderr("\n".join(f"megalite: {line}" for line in lines))
            with suppress(OSError):
                path.write_text(json.dumps({"finding": finding, "ranks": words}, indent=1), encoding="utf-8")
                to_stderr(f"megalite: all stacks: {path}")

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(WRITE_S)
        return first

    def _let_alert_end(self) -> None:
        if self._alerting.ident is not None:
            self._alerting.join(ALERT_S)

    def _exit(self) -> None:
        self._let_alert_end()
        if not self._over.is_set():  # else it went on at the last moment
            os._exit(1)  # the main thread will not


def summary(words: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A line for all ranks that do the same at the same place; ranks that differ from the rest come first."""
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
    """`megalite/train/loop.py:120 launch`, innermost last. Reads no source files: their disk may be what hangs."""
    frames = [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
    return [f"{code.co_filename.removeprefix(ROOT)}:{line} {code.co_name}" for code, line in reversed(frames)]


def find_cause(context: ParallelContext, error: BaseException) -> str:
    """What the ranks know together about why they cannot go on, in a line for people; empty for a single process. A
    rank whose collective breaks sees a socket, not a rank. So all leave word in the store: a rank with an error of its
    own is the cause; a rank without a word was killed, is stopped or hangs."""
    if context.store is None:
        return ""
    store = PrefixStore("failure", context.store)
    try:
        if not is_broken_link(error):
            word = f"rank {context.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
            store.compare_set("cause", "", word)
        store.set(str(context.rank), "")
        if not any(store.check(["cause"]) for _ in pauses(CAUSE_S)):
            silent = [rank for rank in range(context.world_size) if not store.check([str(rank)])]
            word = f"no word from rank {listed(silent)}: killed, stopped or hanging"
            store.compare_set("cause", "", word if silent else "a lost connection (the network?)")
        cause = store.get("cause").decode()
        time.sleep(0.0 if context.rank else READ_S)  # the store may live in rank 0: the others read, too
        return cause
    except DistError:
        return "rank 0 has ended, and with it the place where the ranks met"


def is_broken_link(error: BaseException) -> bool:
    """Whether another rank's failure may be behind this error (gloo has no exception type of its own)."""
    return isinstance(error, DistError) or "third_party/gloo" in str(error)
