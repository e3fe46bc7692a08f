"""Gathers what a report shows of one run, line by line: while it trains, or later from the files of its folder.

Memory stays bounded for a run of any length: figures are thinned (series.py), and only the first and the last events
are kept. Both ways add the same records, so a report that is drawn again is the one that the run drew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from megalite.checkpoint.resume_rules import flatten
from megalite.config.inherited import DERIVED
from megalite.config.user_files import read_yaml
from megalite.errors.problems import NO_VALUE, Problem, UserError
from megalite.observe.report.series import Series
from megalite.train.history import ENDS, EVENTS, read_events, read_metrics
from megalite.train.recorder import STEP_PARTS

DRAWN = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "mfu_causal", "step_time_s", "memory_gib", "loss_scale")
EVALUATED = ("val_loss", "val_bits_per_byte")
OVER_TOKENS = ("loss", "val_loss")  # are also kept by the number of tokens on their lines
STARTS = ("start", "resume")
SUMMED_UP = ("checkpoint", "ranks", "sample")  # all other kinds of events are listed one by one
FIRST, LAST = 40, 120  # listed events that are kept
MOST_SAMPLES = 400


@dataclass
class RunData:
    """One run. `config`: its settings by dotted name; `derived`: those of them that nobody set."""

    folder: Path
    config: dict[str, Any]
    derived: set[str] = field(default_factory=set)
    figures: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in (*DRAWN, *EVALUATED)})
    over_tokens: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in OVER_TOKENS})
    tokens_per_step: set[float] = field(default_factory=set)  # the least and the most of any line
    split: dict[str, Series] = field(default_factory=lambda: {part: Series() for part in STEP_PARTS})  # seconds
    last: dict[str, Any] = field(default_factory=dict)  # the newest line of a step
    first_loss: float | None = None
    best: tuple[int, float] | None = None  # step and least validation loss
    evaluation: dict[str, Any] = field(default_factory=dict)  # the newest
    evaluation_s: float = 0.0
    checkpoints: int = 0
    checkpoint: dict[str, Any] = field(default_factory=dict)  # the newest
    stall_s: float = 0.0  # of all checkpoints
    ranks: dict[str, Any] = field(default_factory=dict)  # the newest figures by rank
    samples: dict[tuple[int, str], str] = field(default_factory=dict)  # by step and prompt
    starts: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None  # of the newest start; None: it has not ended, as far as the files say
    listed: list[dict[str, Any]] = field(default_factory=list)  # events, the oldest and the newest
    left_out: int = 0  # events between them
    slow: set[int] = field(default_factory=set)  # ranks that the newest start found slow
    updated: float = 0.0  # time of the newest event or line
    damage: list[str] = field(default_factory=list)  # what could not be read of its files, in words

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
    def training_s(self) -> float:
        """The time of all steps, without evaluations and checkpoints."""
        return float(self.last.get("training_s") or 0.0)

    @property
    def mfu(self) -> float | None:
        """The mean MFU of the whole run; None where the device's peak is unknown."""
        mfu, newest = self.last.get("mfu"), self.last.get("tokens_per_s")
        return mfu * self.last["mean_tokens_per_s"] / newest if mfu and newest else None

    @property
    def memory_gib(self) -> list[float]:
        """Peak memory by rank; of rank 0 alone where ranks have not told each other yet."""
        return self.ranks.get("memory_gib") or ([self.last["memory_gib"]] if "memory_gib" in self.last else [])

    def record(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        step = line["step"]
        for name in (*DRAWN, *EVALUATED):
            value = line.get(name)
            if isinstance(value, int | float):
                self.figures[name].add(step, value)
                if name in OVER_TOKENS and step > 0 and "tokens" in line:
                    self.over_tokens[name].add(line["tokens"], value)
                    paces = {*self.tokens_per_step, line["tokens"] / step}
                    self.tokens_per_step = {min(paces), max(paces)}
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
        self.last = dict(line)
        if self.first_loss is None:
            self.first_loss = line["loss"]
        split = line.get("time_split") or {}
        for part, series in self.split.items() if split.keys() >= {*STEP_PARTS} else ():
            series.add(line["step"], split[part])

    def happened(self, event: Mapping[str, Any]) -> None:
        """Add a line of events.jsonl."""
        kind, event = event["kind"], dict(event)
        self.updated = max(self.updated, event.get("time") or 0.0)
        if kind == "checkpoint":
            self.checkpoints, self.checkpoint = self.checkpoints + 1, event
            self.stall_s += event.get("stall_s") or 0.0
        elif kind == "ranks":
            self.ranks = event
        elif kind == "sample":
            self._sampled(event)
        elif kind in STARTS:
            self.starts = [*self.starts[:1], event]
            self.end, self.slow = None, set()
        elif kind in ENDS:
            self.end = event
        elif kind == "straggler":
            self.slow.add(event["rank"])
        if kind not in SUMMED_UP:
            self.listed.append(event)
            if len(self.listed) > FIRST + LAST:
                del self.listed[FIRST]
                self.left_out += 1

    def _sampled(self, event: Mapping[str, Any]) -> None:
        key = int(event["step"]), str(event.get("prompt", ""))
        self.samples.pop(key, None)  # of two samples the later one counts
        self.samples[key] = str(event.get("text", ""))
        if len(self.samples) > MOST_SAMPLES:
            steps = sorted({step for step, _ in self.samples})
            gone = {*steps[1:-1:2]}  # every other step between the first and the last
            self.samples = {key: text for key, text in self.samples.items() if key[0] not in gone}


def gather(folder: Path, config: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> RunData:
    """The run in `folder`: these lines of metrics, and the events it holds. `config`: nested, as in config.yaml."""
    given = {name: value for name, value in config.items() if name != DERIVED}
    derived = config.get(DERIVED)
    run = RunData(folder, flatten(given), derived={*map(str, derived)} if isinstance(derived, list) else set())
    for line in lines:
        run.record(line)
    for event in read_events(folder / EVENTS, run.damage.append):
        run.happened(event)
    return run


def read_run(folder: Path, setting: str = "RUN_DIR") -> RunData:
    """The run that a folder holds. Raises UserError where it holds none."""
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    if not folder.is_dir():
        rule = "there is no such folder" if not folder.exists() else "it is a file"
        raise UserError(Problem(setting, str(folder), rule, "the folder of a run: see ls runs"))
    if not config.is_file():
        rule = "it holds no run: there is no config.yaml"
        raise UserError(Problem(setting, str(folder), rule, "the folder of a run, which holds config.yaml"))
    damage, settings = list[str](), read_yaml(config)
    if not isinstance(settings, dict):
        raise UserError(Problem(str(config), NO_VALUE, "holds no settings", "restore it from a copy"))
    run = gather(folder, settings, read_metrics(metrics, damage.append))
    run.damage = [*damage, *run.damage]
    if metrics.exists():
        run.updated = max(run.updated, metrics.stat().st_mtime)
    return run
