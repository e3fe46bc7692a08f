"""Draws several runs on common axes, and the settings in which they differ: comparison.html."""

import os
from collections.abc import Sequence

import numpy as np

from megalite.errors.words import plain
from megalite.observe import readable
from megalite.observe.report.charts import COLOURS, Chart, Line, line_chart
from megalite.observe.report.page import FIGURES, environment, layout_of, status_of
from megalite.observe.run_data import Bucket, RunData

UNREMARKABLE = ("run_dir", "run_name", "resume")
COMPARED = (
    *("loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "tokens_per_s", "step_time_s", "mfu"),
    "moe/imbalance_max",
)
OVER_TOKENS = ("loss", "val_loss")
Differences = list[tuple[str, list[str]]]  # setting, and its value in each run


def compare(runs: Sequence[RunData]) -> str:
    """The whole page."""
    names, columns = names_of(runs), [summary_of(run) for run in runs]
    chosen, derived = differences(runs)
    return (
        environment()
        .get_template("comparison.html")
        .render(
            names=names,
            lines=[{"name": name, "colour": at % COLOURS} for at, name in enumerate(names)],
            charts=charts_of(runs, names),
            summary=[(label, [column[label] for column in columns]) for label in columns[0]],
            chosen=chosen,
            derived=derived,
        )
    )


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Each folder's path below the folder that holds all runs."""
    paths = [run.folder.absolute() for run in runs]
    return [os.path.relpath(path, os.path.commonpath([path.parent for path in paths])) for path in paths]


def charts_of(runs: Sequence[RunData], names: Sequence[str]) -> list[tuple[str, Chart | None]]:
    """Charts with their titles, of the figures that any run has; losses also over tokens, where batches differ."""
    drawn = [(name, "step", FIGURES[name].title, [run.figures[name].buckets for run in runs]) for name in COMPARED]
    paces = [it.high / it.last for run in runs for it in run.figures["tokens"].buckets if it.last > 0]
    if paces and max(paces) > 1.001 * min(paces):
        for name in OVER_TOKENS:
            drawn.append((name, "token", f"{FIGURES[name].title} over tokens", [by_tokens(run, name) for run in runs]))
    charts = []
    for name, over, title, series in drawn:
        called = enumerate(zip(names, series, strict=True))
        lines = [Line(run, buckets, FIGURES[name], at % COLOURS) for at, (run, buckets) in called]
        if any(series):
            charts.append((title, line_chart(FIGURES[name].title.lower(), lines, over=over)))
    return charts


def by_tokens(run: RunData, name: str) -> list[Bucket]:
    """A figure by the tokens that the run had seen at each step."""
    known, buckets = run.figures["tokens"].buckets, run.figures[name].buckets
    if not known:
        return []
    tokens = np.interp([it.x for it in buckets], [it.last for it in known], [it.high for it in known]).tolist()
    return [it._replace(first=at, last=at) for it, at in zip(buckets, tokens, strict=True)]


def summary_of(run: RunData) -> dict[str, str]:
    """What became of a run, by label."""
    last, best, layout, versions = run.last, run.best, layout_of(run), run.start.get("versions") or {}
    return {
        "status": status_of(run, live=False)[0],
        "steps": f"{run.step:,} of {run.steps:,}",
        "tokens": readable.rate(last["tokens"]) if "tokens" in last else "-",
        "training loss": readable.loss(last["loss"]) if last else "-",
        "best validation loss": "-" if best is None else readable.loss(best[1]),
        "at step": "-" if best is None else f"{best[0]:,}",
        "tokens/s": readable.rate(last["mean_tokens_per_s"]) if "mean_tokens_per_s" in last else "-",
        "tokens/s, newest": readable.rate(last["tokens_per_s"]) if "tokens_per_s" in last else "-",
        "MFU": "-" if run.mfu is None else readable.percent(run.mfu),
        "time in training": readable.duration(run.training_s),
        "peak memory, GiB": readable.gibibytes(max(run.memory_gib, default=0.0)),
        "bad steps": f"{last.get('bad_steps', 0):,}",
        "ranks": "-" if layout is None else f"{layout.world_size}",
        "megalite": " ".join(versions[name] for name in ("megalite", "commit") if name in versions) or "-",
        "device": str(run.start.get("device") or "-"),
    }


def differences(runs: Sequence[RunData]) -> tuple[Differences, Differences]:
    """Settings that are not equal in all runs, chosen and derived ones; a dash where a run does not know one."""
    chosen, derived = Differences(), Differences()
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = [plain(run.config[name]) if name in run.config else "-" for run in runs]
        if len(set(values)) > 1 and name not in UNREMARKABLE:
            follows = all(name in run.derived for run in runs if name in run.config)
            (derived if follows else chosen).append((name, values))
    return chosen, derived
