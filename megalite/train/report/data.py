"""What a report shows of one run, gathered line by line: while it trains, or from the files of its folder.

A run of any length takes bounded memory: figures are thinned (series.py), of events the first and the last are kept.
Both ways add the same records, so a report that is rebuilt is the one that the run wrote.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megalite.checkpoint.resume_rules import flatten
from megalite.config.problems import Problem, UserError
from megalite.train.events import ENDS, FILE, read_events
from megalite.train.metrics import read_metrics
from megalite.train.report.series import Series

FIGURES = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "mfu_causal", "step_time_s", "memory_gib", "loss_scale")
EVALUATED = ("val_loss", "val_perplexity", "val_bits_per_byte")
STARTS = ("start", "resume")
COUNTED = ("checkpoint", "ranks", "sample")  # kinds that are summed up; all others are told one by one
FIRST, LAST = 40, 120  # events that are told, of all
MOST_SAMPLES = 400


@dataclass
class RunData:
    """One run. `config`: its settings by dotted name."""

    folder: Path
    config: dict[str, Any]
    figures: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in (*FIGURES, *EVALUATED)})
    split: dict[str, Series] = field(default_factory=dict)  # seconds of a step, by part
    last: dict[str, Any] = field(default_factory=dict)  # the newest line of a step
    first_loss: float | None = None
    best: tuple[int, float] | None = None  # step and least validation loss
    evaluation: dict[str, Any] = field(default_factory=dict)  # the newest
    evaluation_s: float = 0.0
    training_s: float = 0.0  # of all steps
    checkpoint: dict[str, Any] = field(default_factory=dict)  # the newest
    stall_s: float = 0.0  # of all checkpoints
    ranks: dict[str, Any] = field(default_factory=dict)  # the newest figures by rank
    samples: dict[tuple[int, str], str] = field(default_factory=dict)  # by step and prompt
    starts: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None  # of the newest start; None: it has not ended, as far as anybody knows
    told: list[dict[str, Any]] = field(default_factory=list)  # events, the oldest and the newest
    left_out: int = 0  # of them, in between
    kinds: Counter[str] = field(default_factory=Counter)
    slow: dict[int, dict[str, Any]] = field(default_factory=dict)  # ranks in the newest straggler events
    updated: float = 0.0  # time of the newest event or line

    @property
    def start(self) -> dict[str, Any]:
        """The newest start; empty where none was recorded."""
        return self.starts[-1] if self.starts else {}

    @property
    def step(self) -> int:
        return max(int(known.get("step", 0)) for known in (self.last, self.start, self.end or {}))

    @property
    def steps(self) -> int:
        """How many are to be done."""
        return int(self.config.get("train.steps") or 0)

    def setting(self, name: str) -> Any:
        return self.config.get(name)

    def record(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        step = line["step"]
        for name in (*FIGURES, *EVALUATED):
            value = line.get(name)
            if isinstance(value, int | float):
                self.figures[name].add(step, value)
        if "val_loss" in line:
            self._evaluated(line)
        elif "loss" in line:
            self._stepped(line)

    def _evaluated(self, line: Mapping[str, Any]) -> None:
        self.evaluation = dict(line)
        self.evaluation_s += line.get("eval_time_s") or 0.0
        if isfinite(line["val_loss"]) and (self.best is None or line["val_loss"] < self.best[1]):
            self.best = line["step"], line["val_loss"]

    def _stepped(self, line: Mapping[str, Any]) -> None:
        steps = line["step"] - self.last.get("step", 0)
        self.training_s += steps * (line.get("step_time_s") or 0.0)
        self.last = dict(line)
        if self.first_loss is None:
            self.first_loss = line["loss"]
        for part, seconds in (line.get("time_split") or {}).items():
            self.split.setdefault(part, Series()).add(line["step"], seconds)

    def happened(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""
        kind, event = event["kind"], dict(event)
        self.updated = max(self.updated, event.get("time") or 0.0)
        self.kinds[kind] += 1
        if kind == "checkpoint":
            self.checkpoint = event
            self.stall_s += event.get("stall_s") or 0.0
        elif kind == "ranks":
            self.ranks = event
        elif kind == "sample":
            self._sampled(event)
        elif kind in STARTS:
            self.starts = [*self.starts[:1], event]
            self.end = None
            self.slow = {}
        elif kind in ENDS:
            self.end = event
        elif kind == "straggler":
            self.slow[int(event.get("rank", 0))] = event
        if kind not in COUNTED:
            self.told.append(event)
            if len(self.told) > FIRST + LAST:
                del self.told[FIRST]
                self.left_out += 1

    def _sampled(self, event: Mapping[str, Any]) -> None:
        key = int(event["step"]), str(event.get("prompt", ""))
        self.samples.pop(key, None)  # of two the later counts
        self.samples[key] = str(event.get("text", ""))
        if len(self.samples) > MOST_SAMPLES:
            steps = sorted({step for step, _ in self.samples})
            gone = {*steps[1:-1:2]}  # every other one of those between the first and the last
            self.samples = {key: text for key, text in self.samples.items() if key[0] not in gone}


def gather(folder: Path, config: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> RunData:
    """The run in `folder`: these lines of metrics, and the events it holds. `config`: nested, as in config.yaml."""
    run = RunData(folder, flatten(config))
    for line in lines:
        run.record(line)
    for event in read_events(folder / FILE):
        run.happened(event)
    return run


def read_run(folder: Path, setting: str = "RUN_DIR") -> RunData:
    """A run as its folder tells of it. Raises UserError where it is none."""
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    if not folder.is_dir():
        rule = "there is no such folder" if not folder.exists() else "it is a file"
        raise UserError(Problem(setting, str(folder), rule, "the folder of a run: see ls runs"))
    if not config.is_file():
        rule = "it holds no run: there is no config.yaml"
        raise UserError(Problem(setting, str(folder), rule, "the folder of a run, which holds config.yaml"))
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        lines = read_metrics(metrics)
        run = gather(folder, settings if isinstance(settings, dict) else {}, lines)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        rule = f"its files cannot be read: {reason}"
        raise UserError(Problem(setting, str(folder), rule, "restore config.yaml and metrics.jsonl")) from error
    if metrics.exists():
        run.updated = max(run.updated, metrics.stat().st_mtime)
    return run


def as_text(value: Any) -> str:
    """A setting as one writes it on a command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(map(as_text, value))}]"
    return str(value)
