"""Gathers what is shown of one run, record by record: while it trains, or later from the files of its folder.

A record is a line of metrics.jsonl or an event, which has a `kind` (train/history.py). Memory stays bounded for a run
of any length: values are thinned, and only the newest events are kept.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from megalite.checkpoint.commit import CHECKPOINTS, STATE, committed
from megalite.checkpoint.resume_rules import flatten
from megalite.config.settings import DERIVED
from megalite.config.user_files import read_object, read_yaml, refusing
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several
from megalite.train.history import ENDS, EVENTS, METRICS, STEP_PARTS, Note, changes, read_events, read_metrics

SUMMED_UP = ("checkpoint", "ranks", "sample")  # all other kinds of events are listed one by one
MOST_LISTED = 160  # events that are kept: the newest
MOST_SAMPLED = 400  # steps of which samples are kept
MOST_MARKED = 2000  # steps that were not finite
MOST_BUCKETS = 360


class Bucket(NamedTuple):
    """The values of steps `first` to `last`."""

    first: float
    last: float
    low: float
    high: float
    total: float
    size: int = 1  # number of values

    @property
    def x(self) -> float:
        """The step at which the bucket is drawn."""
        return (self.first + self.last) / 2

    @property
    def y(self) -> float:
        """The mean."""
        return self.total / self.size


class Series:
    """Values by step, in ascending order of steps. Values that are not finite are left out.

    Neighbouring steps share a bucket that keeps their least and greatest value, so no peak is lost. All buckets have
    the same width, a power of two of steps, which doubles when there are too many.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._width = 1

    @property
    def mean(self) -> float:
        """The mean of all values, 0 of none."""
        return sum(bucket.total for bucket in self.buckets) / max(1, sum(bucket.size for bucket in self.buckets))

    def add(self, step: float, value: float) -> None:
        if not isfinite(value):
            return
        self._append(Bucket(step, step, value, value, value))
        while len(self.buckets) > MOST_BUCKETS:
            finer, self.buckets, self._width = self.buckets, [], 2 * self._width
            for bucket in finer:
                self._append(bucket)

    def _append(self, new: Bucket) -> None:
        if self.buckets and self.buckets[-1].first // self._width == new.first // self._width:
            first, _, low, high, total, size = self.buckets.pop()
            new = Bucket(first, new.last, min(low, new.low), max(high, new.high), total + new.total, size + new.size)
        self.buckets.append(new)


@dataclass
class RunData:
    """One run. `config`: the settings by dotted name; `derived`: names of settings that nobody set."""

    folder: Path
    config: dict[str, Any]
    derived: set[str] = field(default_factory=set)
    series: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))  # `moe/entropy`, ...
    first: dict[str, Any] = field(default_factory=dict)  # the first value of each number
    last: dict[str, Any] = field(default_factory=dict)  # the newest line of a step
    evaluation: dict[str, Any] = field(default_factory=dict)  # the newest
    best: tuple[int, float] | None = None  # step and least validation loss
    evaluation_s: float = 0.0
    not_finite: set[int] = field(default_factory=set)  # steps whose loss or gradient was not
    tokens: list[list[list[int]]] = field(default_factory=list)  # by layer and expert: in all steps, in the newest
    tokens_until: int = 0  # the step of the newest
    checkpoints: int = 0
    checkpoint: dict[str, Any] = field(default_factory=dict)  # the newest
    stall_s: float = 0.0  # of all checkpoints
    ranks: dict[str, Any] = field(default_factory=dict)  # the newest numbers by rank
    samples: dict[int, dict[str, str]] = field(default_factory=dict)  # texts by step and prompt
    starts: list[dict[str, Any]] = field(default_factory=list)  # the first and the newest
    end: dict[str, Any] | None = None  # of the newest start; None: it has not ended, as far as the files say
    listed: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_LISTED))  # events
    left_out: int = 0  # older events
    slow: set[int] = field(default_factory=set)  # ranks that the newest start found slow
    updated: float = 0.0  # time of the newest event or line
    damage: list[str] = field(default_factory=list)  # what could not be read of the files, in words

    @property
    def start(self) -> dict[str, Any]:
        """The newest start; empty where none was recorded."""
        return self.starts[-1] if self.starts else {}

    @property
    def step(self) -> int:
        return max(int(known.get("step", 0)) for known in (self.last, self.start, self.end or {}))

    @property
    def steps(self) -> int:
        """How many steps the run is to do."""
        return int(self.config.get("train.steps") or 0)

    @property
    def mfu(self) -> float | None:
        """The mean MFU of the whole run; None where the device's peak is unknown."""
        mfu, newest = self.last.get("mfu"), self.last.get("tokens_per_s")
        return mfu * self.last["mean_tokens_per_s"] / newest if mfu and newest else None

    @property
    def memory_gib(self) -> list[float]:
        """Peak memory by rank; of rank 0 alone where ranks have not gathered theirs yet."""
        return self.ranks.get("memory_gib") or ([self.last["memory_gib"]] if "memory_gib" in self.last else [])

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a record or an event."""
        if "kind" in line:
            self._add_event(dict(line))
            return
        step, nested = line["step"], dict[str, Any]()
        if "time_split" in line:  # older runs know no exchange
            nested = {f"time_split/{part}": 0.0 for part in STEP_PARTS}
        for group in ("time_split", "moe"):
            nested |= {f"{group}/{name}": value for name, value in (line.get(group) or {}).items()}
        for name, value in ({**line} | nested).items():
            if isinstance(value, int | float):
                self.first.setdefault(name, value)
                self.series[name].add(step, value)
        self._add_tokens(step, nested.get("moe/tokens_per_expert"))
        if "val_loss" not in line:
            self.last = dict(line)
            if not isfinite(line["loss"]) or not isfinite(line.get("grad_norm", 0.0)):
                self._mark(step)
            return
        self.evaluation = dict(line)
        self.evaluation_s += line.get("eval_time_s") or 0.0
        if isfinite(line["val_loss"]) and (self.best is None or line["val_loss"] < self.best[1]):
            self.best = step, line["val_loss"]

    def _add_tokens(self, step: int, counts: Any) -> None:
        """Count the tokens of experts, and keep how uneven each layer was. Steps that were skipped have no tokens."""
        if not isinstance(counts, list) or not counts or not all(isinstance(row, list) and sum(row) for row in counts):
            return
        before = self.tokens[0] if self.tokens else []
        if [*map(len, before)] != [*map(len, counts)]:
            before = [[0] * len(row) for row in counts]
        sums = [[one + more for one, more in zip(*rows, strict=True)] for rows in zip(before, counts, strict=True)]
        self.tokens, self.tokens_until = [sums, counts], step
        for layer, row in enumerate(counts):
            self.series[f"layer/{layer}"].add(step, max(row) * len(row) / sum(row))

    def _mark(self, step: int) -> None:
        if len(self.not_finite) < MOST_MARKED:
            self.not_finite.add(step)

    def _add_event(self, event: dict[str, Any]) -> None:
        kind, step = event["kind"], event["step"]
        self.updated = max(self.updated, event.get("time") or 0.0)
        match kind:
            case "checkpoint":
                self.checkpoints, self.checkpoint = self.checkpoints + 1, event
                self.stall_s += event.get("stall_s") or 0.0
            case "ranks":
                self.ranks = event
            case "sample":
                self.samples.setdefault(step, {})[event["prompt"]] = event["text"]
                for gone in sorted(self.samples)[1:-1:2] if len(self.samples) > MOST_SAMPLED else ():
                    del self.samples[gone]
            case "start" | "resume":
                self.starts = [*self.starts[:1], event]
                self.end, self.slow = None, set()
            case "skipped":
                self._mark(step)
            case "record_changed":
                self.damage.append(str(event.get("message")))
            case "straggler":
                self.slow.add(event["rank"])
        self.end = event if kind in ENDS else self.end
        if kind not in SUMMED_UP:
            self.left_out += len(self.listed) == MOST_LISTED
            self.listed.append(event)


def _in_order(records: list[dict[str, Any]], note: Note) -> list[dict[str, Any]]:
    """The records by step, each step and each evaluation once."""
    once = {(record["step"], "val_loss" in record): record for record in records}
    if repeated := len(records) - len(once):
        note(f"{METRICS}: {several(repeated, 'line')} of steps that stand there again later; left out")
    if list(once) != sorted(once):
        note(f"{METRICS}: the lines are not in the order of their steps; shown in that order")
    return [once[key] for key in sorted(once)]


def read_run(folder: Path) -> RunData:
    """The run that a folder holds. Raises UserError where it holds none."""
    metrics, config = folder / METRICS, folder / "config.yaml"
    if not config.is_file():
        rule = "it holds no run: there is no config.yaml"
        raise UserError(Problem("RUN_DIR", str(folder), rule, "the folder of a run: see ls runs"))
    settings = read_yaml(config)
    with refusing(config):
        if not isinstance(settings, dict):
            raise ValueError("holds no settings")
    derived = settings.pop(DERIVED, None)
    run = RunData(folder, flatten(settings), derived={*map(str, derived)} if isinstance(derived, list) else set())
    note = run.damage.append
    for line in [*_in_order(read_metrics(metrics, note), note), *read_events(folder / EVENTS, note)]:
        run.add(line)
    for step, checkpoint in committed(folder / CHECKPOINTS)[:1]:
        with contextlib.suppress(UserError):  # a damaged checkpoint is the next start's concern
            sealed = read_object(checkpoint / STATE).get("record")
            found = changes(folder, sealed, step) if isinstance(sealed, dict) else []
            run.damage += [words for words in found if words not in run.damage]
    if metrics.exists():
        run.updated = max(run.updated, metrics.stat().st_mtime)
    return run
