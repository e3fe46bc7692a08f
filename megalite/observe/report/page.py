"""Draws a report of one run, or of several on common axes.

page.html says what stands where. The page carries the records, thinned; report.js draws them in the browser. The
layout and the pipeline are the pictures of the plan commands.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megalite.config.user_files import as_record
from megalite.errors.problems import UserError, printable
from megalite.errors.words import plain
from megalite.layout.ranks import ParallelLayout
from megalite.observe import readable
from megalite.observe.run_data import RunData
from megalite.plan.picture import STYLE
from megalite.plan.ranks import ranks_picture
from megalite.plan.timeline import pictures_of_run
from megalite.train.history import METRICS

HERE = Path(__file__).parent
SCRIPTS = (HERE / "charts.js", HERE / "report.js")
UNREMARKABLE = ("run_dir", "run_name", "resume")  # settings that are no difference between runs
MOST_NAMED = 3  # settings that name the runs of a sweep
MOST_MARKED = 2000  # steps that were not finite
MOST_RANKS = 2**20  # of a layout that is drawn
MOST_CELLS, MOST_COLUMNS, MOST_STEPS = 2048, 256, 90  # of a heat map: in all, experts in a row, steps in a row
Differences = list[tuple[str, list[Any]]]  # setting, and its value in each run


@cache
def environment() -> Environment:
    """The templates. Nothing that comes from a run is ever markup, and a page runs our script alone."""
    found = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    files = [path.read_text(encoding="utf-8") for path in (*SCRIPTS, STYLE, HERE / "report.css")]
    script, style = Markup('"use strict";\n(() => {\n' + "\n".join(files[:2]) + "})();\n"), Markup("".join(files[2:]))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    found.globals.update(script=script, style=style, policy=policy)
    found.filters |= {name: words for name, words in vars(readable).items() if callable(words)}
    found.filters |= {"moment": moment, "plain": plain}
    return found


def moment(seconds: float) -> str:
    """A time in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def render(runs: Sequence[RunData], *, live: bool = False, compared: bool = False) -> str:
    """The whole page of one run, or of several that are `compared`. `live`: the run goes on, as the caller knows."""
    chosen, derived = differences(runs)
    names, (run, *others) = names_of(runs, chosen), runs
    compared = compared or bool(others)
    records = json.dumps(records_of(runs, names, chosen, compared), separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # nothing in it can end the element that holds it
        records = records.replace(character, f"\\u{ord(character):04x}")
    values = {
        **{"names": names, "run": run, "chosen": chosen, "derived": derived, "compared": compared},
        **{"records": Markup(records), "status": status_of(run, live=live), "drawn": moment(time.time())},
        **(pictures_of(run) if not compared else {"summary": summary_of(runs)}),
    }
    return environment().get_template("page.html").render(values).lstrip()


# --- what the script draws


def records_of(runs: Sequence[RunData], names: Sequence[str], chosen: Differences, compared: bool) -> dict[str, Any]:
    """The records that report.js reads. Numbers by rank and of experts are those of a single run."""
    tokens = [run.series["tokens"] for run in runs]
    paces = [count / step for its in tokens for step, count in zip(its.steps, its.values, strict=True) if step > 0]
    results, unit = result_of(runs)
    return {
        "compared": compared,
        "over": "token" if compared and paces and max(paces) > 1.001 * min(paces) else "step",
        "result": unit,
        "settings": [{"name": name, "values": [_simple(value) for value in values]} for name, values in chosen],
        "runs": [
            {
                "name": printable(name),
                "result": result,
                "series": {key: _points(its.points()) for key, its in run.series.items() if key[:6] != "layer/"},
                "not_finite": sorted(run.not_finite)[-MOST_MARKED:],
                **({} if compared else {"ranks": ranks_of(run), "experts": experts_of(run)}),
            }
            for run, name, result in zip(runs, names, results, strict=True)
        ],
    }


def result_of(runs: Sequence[RunData]) -> tuple[list[float | None], str]:
    """The loss by which runs are compared, and its name: the least validation loss where any run has one, else the last
    training loss."""
    best = [run.best[0] if isfinite(run.best[0]) else None for run in runs]
    if any(loss is not None for loss in best):
        return best, "least validation loss"
    points = [run.series["loss"].points() for run in runs]
    return [its[-1][1] if its else None for its in points], "training loss at the end"


def ranks_of(run: RunData) -> dict[str, Any]:
    """Memory and computing time by rank, and which ranks were found slow."""
    by_rank = {"memory_gib": run.memory_gib, "compute_s": run.newest.get("ranks", {}).get("compute_s") or []}
    numbers = {name: [value if isfinite(value) else 0.0 for value in values] for name, values in by_rank.items()}
    return numbers | {"slow": sorted(run.slow)}


def experts_of(run: RunData) -> dict[str, Any] | None:
    """The load of experts: of each layer over the steps, of each expert in all steps and in the newest. Where experts
    are very many, neighbours share a cell, of which the largest counts."""
    if run.loads is None:
        return None
    first, every = (int(run.config.get(f"model.moe.{name}") or 0) for name in ("first_dense_layers", "layer_freq"))
    layers, experts = run.loads[0].shape
    together = max(-(-layers * experts // MOST_CELLS), -(-experts // MOST_COLUMNS))
    cells = range(0, experts, together)
    shares = [np.maximum.reduceat(load / load.sum(axis=1, keepdims=True), cells, axis=1) for load in run.loads]
    imbalance = np.array([run.series[f"layer/{layer}"].points() for layer in range(layers)])  # [layers, points, 4]
    columns = range(0, imbalance.shape[1], -(-imbalance.shape[1] // MOST_STEPS))
    return {
        "layers": [first + layer * (every or 1) for layer in range(layers)],
        "count": experts,
        "together": together,
        "until": run.last.get("step"),
        "steps": imbalance[0, columns, 0].round().tolist(),
        "imbalance": np.maximum.reduceat(imbalance[:, :, 3], columns, axis=1).round(3).tolist(),
        "all": shares[0].round(5).tolist(),
        "newest": shares[1].round(5).tolist(),
    }


def _points(points: list[list[float]]) -> list[list[float]]:
    """Step and mean, and the least and greatest value where they differ."""
    return [[float(f"{value:.6g}") for value in point[: 4 if point[2] < point[3] else 2]] for point in points]


def _simple(value: Any) -> Any:
    """A setting as the script shows it: a number, or words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return value if is_number else printable(plain(value))


# --- what the template shows


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
    words = [[f"{name.rpartition('.')[2]}={plain(value)}" for value in values] for name, values in chosen]
    names = [" ".join(its) for its in zip(*words, strict=True)]
    if len({*names}) == len(runs) and len(chosen) <= MOST_NAMED:
        return names
    paths = [run.folder.absolute() for run in runs]
    return [os.path.relpath(path, os.path.commonpath([path.parent for path in paths])) for path in paths]


def status_of(run: RunData, *, live: bool = False) -> tuple[str, str]:
    """How a run stands, in a word, and the style of that word. `live`: it goes on."""
    if run.end is None:
        return ("running", "run") if live else ("not ended" if run.start else "end unknown", "warn")
    kind = str(run.end["kind"])
    if kind != "failed" and run.end.get("status"):
        return f"{kind}, not saved", "bad"
    return kind, {"finished": "good", "failed": "bad"}.get(kind, "warn")


def summary_of(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """The runs in numbers, by label."""
    rows: dict[str, Any] = {
        "folder": lambda run: str(run.folder),
        "status": lambda run: status_of(run)[0],
        "steps": lambda run: f"{run.step:,} of {run.steps:,}",
        "tokens": lambda run: readable.rate(run.last["tokens"]),
        "training loss": lambda run: readable.loss(run.last["loss"]),
        "least validation loss": lambda run: readable.loss(run.best[0]) if run.evaluation else "-",
        "tokens/s": lambda run: readable.rate(run.last["mean_tokens_per_s"]),
        "MFU": lambda run: "-" if run.mfu is None else readable.percent(run.mfu),
        "time in training": lambda run: readable.duration(run.last["training_s"]),
        "peak memory, GiB": lambda run: readable.gibibytes(max(run.memory_gib)),
        "bad steps": lambda run: str(run.last["bad_steps"]),
        "ranks": lambda run: str(len(run.start["hosts"])),
        "device": lambda run: str(run.start["device"]),
    }
    return [(label, [_known(words, run) for run in runs]) for label, words in rows.items()]


def _known(words: Any, run: RunData) -> str:
    try:
        return str(words(run))
    except (KeyError, ValueError):  # a run of which nothing is recorded
        return "-"


def pictures_of(run: RunData) -> dict[str, list[Markup]]:
    """Pictures of the layout and of the pipeline, which are empty where the newest start has recorded no layout."""
    layout = None
    with suppress(UserError, AssertionError):  # the record was changed
        layout = as_record(ParallelLayout, run.start.get("layout"), METRICS)
    if layout is None or layout.world_size > MOST_RANKS:
        return {"layout": [], "pipeline": []}
    pictures = [ranks_picture(layout, int(run.start.get("ranks_per_node") or layout.world_size))]
    drawn = pictures_of_run(run.folder, run.config, layout.dp) if layout.pp > 1 else ()
    return {"layout": [Markup(it.svg()) for it in pictures], "pipeline": [Markup(it.svg()) for it in drawn]}
