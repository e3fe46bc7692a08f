"""Compares runs: the settings in which they differ, names for legends, and what became of each."""

import os
from collections.abc import Sequence
from typing import Any

from megalite.errors.words import plain
from megalite.layout.ranks import ParallelLayout
from megalite.observe import readable
from megalite.observe.run_data import RunData

UNREMARKABLE = ("run_dir", "run_name", "resume")
MOST_NAMED = 3  # settings that name the runs of a sweep
Differences = list[tuple[str, list[Any]]]  # setting, and its value in each run


def differences(runs: Sequence[RunData]) -> tuple[Differences, Differences]:
    """Settings that are not equal in all runs, chosen and derived ones; a dash where a run does not know one."""
    chosen, derived = Differences(), Differences()
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = [run.config.get(name, "-") for run in runs]
        if len(set(map(plain, values))) > 1 and name not in UNREMARKABLE:
            follows = all(name in run.derived for run in runs if name in run.config)
            (derived if follows else chosen).append((name, values))
    return chosen, derived


def names_of(runs: Sequence[RunData], chosen: Differences) -> list[str]:
    """The settings in which the runs differ, where these are few and tell all runs apart; else the path of each run's
    folder below the folder that holds all."""
    if 0 < len(chosen) <= MOST_NAMED:
        words = [[f"{name.rpartition('.')[2]}={plain(value)}" for value in values] for name, values in chosen]
        names = [" ".join(its) for its in zip(*words, strict=True)]
        if len({*names}) == len(runs):
            return names
    paths = [run.folder.absolute() for run in runs]
    return [os.path.relpath(path, os.path.commonpath([path.parent for path in paths])) for path in paths]


def result_of(runs: Sequence[RunData]) -> tuple[list[float | None], str]:
    """The loss by which runs are compared, and its name: the least validation loss where any run has one, else the last
    training loss."""
    best = [None if run.best is None else run.best[1] for run in runs]
    if any(loss is not None for loss in best):
        return best, "least validation loss"
    buckets = [run.series["loss"].buckets for run in runs]
    return [its[-1].y if its else None for its in buckets], "training loss at the end"


def status_of(run: RunData, *, live: bool = False) -> tuple[str, str]:
    """How a run stands, in a word, and the style of that word. `live`: it goes on."""
    if run.end is None:
        return ("running", "run") if live else ("not ended" if run.starts else "end unknown", "warn")
    kind = str(run.end["kind"])
    if kind != "failed" and run.end.get("status"):
        return f"{kind}, not saved", "bad"
    return kind, {"finished": "good", "failed": "bad"}.get(kind, "warn")


def summary_of(run: RunData, layout: ParallelLayout | None) -> dict[str, str]:
    """A run in numbers, by label."""
    last, best, versions = run.last, run.best, run.start.get("versions") or {}
    return {
        "folder": str(run.folder),
        "status": status_of(run)[0],
        "steps": f"{run.step:,} of {run.steps:,}",
        "tokens": readable.rate(last["tokens"]) if "tokens" in last else "-",
        "training loss": readable.loss(last["loss"]) if last else "-",
        "best validation loss": "-" if best is None else readable.loss(best[1]),
        "at step": "-" if best is None else f"{best[0]:,}",
        "tokens/s": readable.rate(last["mean_tokens_per_s"]) if "mean_tokens_per_s" in last else "-",
        "tokens/s, newest": readable.rate(last["tokens_per_s"]) if "tokens_per_s" in last else "-",
        "MFU": "-" if run.mfu is None else readable.percent(run.mfu),
        "time in training": readable.duration(last.get("training_s") or 0.0),
        "peak memory, GiB": readable.gibibytes(max(run.memory_gib, default=0.0)),
        "bad steps": f"{last.get('bad_steps', 0):,}",
        "ranks": "-" if layout is None else f"{layout.world_size}",
        "megalite": " ".join(versions[name] for name in ("megalite", "commit") if name in versions) or "-",
        "device": str(run.start.get("device") or "-"),
    }
