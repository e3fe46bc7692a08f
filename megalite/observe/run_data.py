"""Gathers what is shown of one run, record by record: while it trains, or later from the files of its folder.

A record is a line of metrics.jsonl or an event, which has a `kind` (train/history.py).
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from megalite.checkpoint.commit import CHECKPOINTS, STATE, committed
from megalite.config.files import read_object, read_yaml, refusing
from megalite.config.settings import DERIVED, leaves
from megalite.errors.problems import Problem, UserError
from megalite.train.history import ENDS, EVENTS, METRICS, STEP_PARTS, changes, is_evaluation, read_events, read_metrics

SUMMED_UP = ("checkpoint", "uploaded", "ranks", "sample")  # all other kinds of events are listed one by one
MOST_LISTED = 160  # events that are kept: the newest
MOST_SAMPLED = 12  # steps of which samples are kept: the first, the newest and some between
MOST_POINTS = 360  # of a curve


class Series:
    """Values by step, in ascending order of steps. It takes no more memory for a long run: beyond MOST_POINTS, two
    neighbouring points become one."""

    def __init__(self) -> None:
        self.first = nan  # value that is finite
        self._points: list[tuple[float, ...]] = []  # number of values; sums of steps and values; least, greatest
        self._width = 1  # values of a point; the last may have fewer

    def add(self, step: float, value: float) -> None:
        if not isfinite(value):
            return
        self.first = self.first if self._points else value
        self._points.append((1, step, value, value, value))
        if len(self._points) > 1 and self._points[-2][0] < self._width:
            self._points[-2:] = [_together(self._points[-2:])]
        if len(self._points) > MOST_POINTS:
            pairs = range(0, len(self._points), 2)
            self._points, self._width = [_together(self._points[at : at + 2]) for at in pairs], 2 * self._width

    def points(self) -> list[list[float]]:
        """Step, mean, least and greatest of the finite values, each for neighbouring steps where there are many. So no
        peak is lost."""
        return [[steps / count, values / count, least, most] for count, steps, values, least, most in self._points]


def _together(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """One point of a series in the place of these."""
    count, steps, values, least, most = zip(*points, strict=True)
    return sum(count), sum(steps), sum(values), min(least), max(most)


@dataclass
class RunData:
    """One run. `config`: the settings by dotted name; `derived`: names of settings that nobody set."""

    folder: Path
    config: dict[str, Any]
    derived: set[str] = field(default_factory=set)
    series: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))  # `moe/entropy`, ...
    last: dict[str, Any] = field(default_factory=dict)  # the newest line of a step
    evaluation: dict[str, Any] = field(default_factory=dict)  # the newest
    best: tuple[float, int] = (inf, 0)  # least validation loss and its step
    not_finite: set[int] = field(default_factory=set)  # steps whose loss or gradient was not
    loads: tuple[Any, Any] | None = None  # tokens by layer and expert [layers, experts]: in all steps, in the newest
    newest: dict[str, dict[str, Any]] = field(default_factory=dict)  # event by kind; a resume is a start
    end: dict[str, Any] | None = None  # of the newest start; None: it has not ended, as far as the files say
    samples: dict[int, dict[str, str]] = field(default_factory=dict)  # texts by step and prompt
    listed: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_LISTED))  # events
    stall_s: float = 0.0  # of all checkpoints
    slow: set[int] = field(default_factory=set)  # ranks that the newest start found slow
    damage: list[str] = field(default_factory=list)  # what could not be read of the files, in words

    @property
    def start(self) -> dict[str, Any]:
        """The newest start; empty where none was recorded."""
        return self.newest.get("start", {})

    @property
    def step(self) -> int:
        return max(int(known.get("step", 0)) for known in (self.last, self.start, self.end or {}))

    @property
    def steps(self) -> int:
        """How many steps the run is to do."""
        return int(self.config.get("train.steps") or 0)

    @property
    def memory_gib(self) -> list[float]:
        """Peak memory by rank; of rank 0 alone where ranks have not gathered theirs yet."""
        known = self.newest.get("ranks", self.last).get("memory_gib", [])
        return known if isinstance(known, list) else [known]

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line of metrics or an event."""
        if "kind" in record:
            self._add_event(dict(record))
            return
        step = record["step"]
        known = [f"time_split/{part}" for part in STEP_PARTS if "time_split" in record]  # older runs know no exchange
        for name, value in (dict.fromkeys(known, 0.0) | flat_values(record)).items():
            self.series[name].add(step, value)
        for kind in ("", "group_"):
            weights = record.get(f"{kind}weight_rms", {})
            for name, update in record.get(f"{kind}update_rms", {}).items():
                if weight := weights.get(name):
                    self.series[f"{kind}relative_update/{name}"].add(step, update / weight)
        if is_evaluation(record):
            self.evaluation = dict(record)
            self.best = min(self.best, (record.get("val_loss", inf), step))  # no nan is less
            return
        self.last = dict(record)
        self._add_loads(step, record.get("moe", {}).get("tokens_per_expert") or [])
        if not isfinite(record["loss"]) or not isfinite(record.get("grad_norm", 0.0)):
            self.not_finite.add(step)

    def _add_loads(self, step: int, rows: Any) -> None:
        """Count the tokens of experts, and keep how uneven each layer was. Steps that were skipped have no tokens."""
        if not isinstance(rows, list) or len({len(row) for row in rows}) != 1 or not all(map(sum, rows)):
            return
        counts = np.array(rows, dtype=float)
        before = self.loads[0] if self.loads and self.loads[0].shape == counts.shape else 0.0
        self.loads = before + counts, counts
        for layer, row in enumerate(counts):
            self.series[f"layer/{layer}"].add(step, row.max() / row.mean())

    def _add_event(self, event: dict[str, Any]) -> None:
        kind, step = event["kind"], event["step"]
        self.newest["start" if kind == "resume" else kind] = event
        match kind:
            case "checkpoint":
                self.stall_s += event.get("stall_s") or 0.0
            case "sample":
                self.samples.setdefault(step, {})[event["prompt"]] = event["text"]
                for gone in sorted(self.samples)[1:-1:2] if len(self.samples) > MOST_SAMPLED else ():
                    del self.samples[gone]
            case "start" | "resume":
                self.end, self.slow = None, set()
            case "skipped":
                self.not_finite.add(step)
            case "record_changed":
                self.damage.append(str(event.get("message")))
            case "settings_changed":
                self.config |= event["settings"]
            case "straggler":
                self.slow.add(event["rank"])
        self.end = event if kind in ENDS else self.end
        if kind not in SUMMED_UP:
            self.listed.append(event)


def flat_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """The known numbers of a record of metrics by name, but the step. Nested ones get names like `time_split/forward`,
    which trackers show as groups."""
    named = {} if "kind" in record else leaves({**record, "step": None, "validation": None})
    sets = record.get("validation", {}).items()  # beside val_loss: val_loss/web
    named |= {f"val_{measure}.{name}": it for name, its in sets for measure, it in its.items()}
    known = {name: value for name, value in named.items() if isinstance(value, int | float)}
    return {name.replace("'", "").replace(".", "/"): value for name, value in known.items()}  # a pattern is quoted


def read_run(folder: Path) -> RunData:
    """The run that a folder holds. Raises UserError where it holds none."""
    config = folder / "config.yaml"
    if not config.is_file():
        rule = "it holds no run: there is no config.yaml"
        raise UserError(Problem("RUN_DIR", str(folder), rule, "the folder of a run: see ls runs"))
    settings = read_yaml(config)
    with refusing(config):
        if not isinstance(settings, dict):
            raise ValueError("holds no settings")
    run = RunData(folder, {}, {*(settings.pop(DERIVED, None) or [])})
    records = read_metrics(folder / METRICS, run.damage.append)
    once = {(record["step"], is_evaluation(record)): record for record in records}
    if len(once) < len(records) or list(once) != sorted(once):
        run.damage.append(f"{METRICS}: lines repeat steps or are not in order; the last line of each step is shown")
    for record in [*(once[key] for key in sorted(once)), *read_events(folder / EVENTS, run.damage.append)]:
        run.add(record)
    run.config = leaves(settings)  # later than any event
    for step, checkpoint in committed(folder / CHECKPOINTS)[:1]:
        with suppress(UserError):  # a damaged checkpoint is the next start's concern
            found = changes(folder, read_object(checkpoint / STATE).get("record") or {}, step)
            run.damage += [words for words in found if words not in run.damage]
    return run
