"""Draws a report of one run, or of several on common axes: a run's own while it goes on, others on request.

page.html says what stands where. The page carries the records, thinned; report.js draws them in the browser. Layout and
pipeline are the pictures of the plan commands.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from megalite.config import files
from megalite.config.files import Kind
from megalite.errors.problems import Problem, UserError, collect, collect_all, plain, printable
from megalite.layout.ranks import ParallelLayout
from megalite.observe import readable
from megalite.observe.run_data import RunData, read_run
from megalite.plan.chart import chart
from megalite.plan.picture import STYLE, Picture, picture_of
from megalite.plan.ranks import ranks_picture
from megalite.plan.timeline import pictures_of_run
from megalite.train.history import ENDS, EVENTS, Record, View

HERE = Path(__file__).parent
SCRIPTS = (HERE / "charts.js", HERE / "report.js")
UNREMARKABLE = ("run_dir", "run_name", "resume")  # settings that are no difference between runs
BY_LAYER = (
    "relative_update",
    "layer_attention_logit",
    "activation_rms",
    "gradient_rms",
)  # series with a value for each layer, in one picture
# How series begin that no curve shows: those by layer would be too many.
APART = (
    "layer",
    "relative_update/",
    "activation_rms/",
    "gradient_rms/",
    "update_",
    "weight_rms/",
    "group_update_",
    "group_weight_",
)
MOST_NAMED = 3  # settings that name the runs of a sweep
SHARE = 300  # a run goes on for so many times as long as the last drawing took
_PAGE = rb'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<meta (name="generator" content="'
_POLICY = rb'"|http-equiv="Content-Security-Policy" content="[^"\n]*sha256-)'  # pages of f4fa60b
REPORT = Kind("the report of a run", "report.html", _PAGE + b"megalite report" + _POLICY)
COMPARISON = Kind("a comparison of runs", "comparison.html", _PAGE + b"megalite comparison" + _POLICY)
CURVES = picture_of("report")
Differences = list[tuple[str, list[Any]]]  # setting, and its value in each run


def live_report(run: RunData, interval_s: float) -> View:
    """The view (train/history.py) that draws report.html of a run that goes on, in at most one part in SHARE of its
    time. `interval_s`: between two drawings at least; 0: only at the end."""
    due = 0.0 if interval_s > 0 else inf

    def show(record: Record) -> None:
        nonlocal due
        run.add(record)
        begun, ended = time.monotonic(), record.get("kind") in ENDS
        if not ended and ("kind" in record or begun < due):
            return
        try:
            page = render([run], live=not ended).encode(errors="replace")
            files.write_atomically(run.folder / REPORT.usual, page, REPORT)
        finally:
            now = time.monotonic()
            due = now + max(interval_s, SHARE * (now - begun)) if interval_s else due

    return show


def write_report(folders: Sequence[Path], out: Path | None, kind: Kind | None = None) -> Path:
    """Draw one run, into its folder unless `out` says otherwise, or compare several (comparison.html here, or `out`);
    where `out` ends in .svg, the curves of the loss alone. Returns the file, of which only `out` is as readable as the
    umask says. UserError with all folders that hold no run, or for a file that cannot be written."""
    kind = kind or (REPORT if len(folders) == 1 else COMPARISON)
    kind = CURVES if out and out.suffix.lower() == ".svg" else kind
    target = out or (folders[0] / kind.usual if kind is REPORT else Path(kind.usual))
    problems = files.output_problems("--out", target, kind)
    runs = collect(lambda: collect_all(read_run, folders), problems)
    if runs is None or problems:
        raise UserError(problems)
    try:
        with nullcontext() if out else files.private_files():
            page = loss_curves(runs).file("report") if kind is CURVES else render(runs, compared=kind is COMPARISON)
            files.write_atomically(target, page.encode(errors="replace"), kind)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise UserError(Problem("--out", str(target), rule, "another file: --out FILE")) from error
    return target


@cache
def environment() -> Environment:
    """The templates. Nothing that comes from a run is ever markup, and a page runs our script alone."""
    found = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
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
    layout, pipeline = ([], []) if compared else pictures_of(run)
    as_of = moment(max((event["time"] for event in run.newest.values()), default=0.0))
    shown: dict[str, Any] = {"run": run, "runs": [*zip(names, runs, strict=True)], "as_of": as_of}
    shown |= {"layout": layout, "pipeline": pipeline, "chosen": chosen, "derived": derived, "records": Markup(records)}
    return environment().get_template("page.html").render(shown, compared=compared, live=live).lstrip()


def records_of(runs: Sequence[RunData], names: Sequence[str], chosen: Differences, compared: bool) -> dict[str, Any]:
    """The records that report.js reads. Numbers by rank and of experts are those of a single run."""
    return {
        "compared": compared,
        "settings": [{"name": name, "values": [*map(_shown, values)]} for name, values in chosen],
        "runs": [
            {
                "name": printable(name),
                "series": {key: _points(its.points()) for key, its in run.series.items() if not key.startswith(APART)},
                "not_finite": sorted(run.not_finite)[-2000:],
                **({} if compared else {"experts": experts_of(run), "slow": sorted(run.slow)}),
                "layers": {} if compared else {name: layers_of(run, name) for name in BY_LAYER},
                "memory_gib": np.nan_to_num(run.memory_gib, posinf=0.0).tolist(),
                "compute_s": np.nan_to_num(run.newest.get("ranks", {}).get("compute_s", []), posinf=0.0).tolist(),
            }
            for run, name in zip(runs, names, strict=True)
        ],
    }


def layers_of(run: RunData, name: str) -> dict[str, Any]:
    """The names of layers, the steps, and the greatest value of neighbouring steps for each layer."""
    its = {key.partition("/")[2]: one.points() for key, one in run.series.items() if key.startswith(f"{name}/")}
    steps = [point[0] for point in max(its.values(), key=len, default=[])]
    return {"names": [*its], "steps": steps, "rows": [[float(f"{it[3]:.4g}") for it in row] for row in its.values()]}


def experts_of(run: RunData) -> dict[str, Any] | None:
    """Tokens by layer and expert, in all steps and in the newest, and how uneven each layer was over the steps."""
    if run.loads is None:
        return None
    first, every = (int(run.config.get(f"model.moe.{name}") or 0) for name in ("first_dense_layers", "layer_freq"))
    numbers = range(len(run.loads[0]))
    return {
        "layers": [first + layer * (every or 1) for layer in numbers],
        "until": run.last.get("step"),
        "imbalance": [_points(run.series[f"layer/{layer}"].points()) for layer in numbers],
        "all": run.loads[0].tolist(),
        "newest": run.loads[1].tolist(),
    }


def _points(points: list[list[float]]) -> list[list[float]]:
    """Step and mean, and the least and greatest value where they differ."""
    return [[float(f"{value:.6g}") for value in point[: 4 if point[2] < point[3] else 2]] for point in points]


def _shown(setting: Any) -> Any:
    return setting if isinstance(setting, int | float) else printable(plain(setting))


def loss_curves(runs: Sequence[RunData]) -> Picture:
    """Validation loss of each run by step; the training loss of all where a run has none. UserError without either."""
    name = "val_loss" if all(run.series["val_loss"].points() for run in runs) else "loss"
    curves = [[(step, mean) for step, mean, *_ in run.series[name].points()] for run in runs]
    rule = "no loss is recorded", "a run that has trained"
    if problems := [
        Problem("RUN_DIR", str(run.folder), *rule) for run, curve in zip(runs, curves, strict=True) if not curve
    ]:
        raise UserError(problems)
    names = names_of(runs, differences(runs)[0])
    return chart(name.replace("val_", "validation "), [*zip(names, curves, strict=True)], "step")


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


def pictures_of(run: RunData) -> tuple[list[Markup], list[Markup]]:
    """Pictures of the layout and of the pipeline; none where the newest start has recorded no layout."""
    layout = None
    with suppress(UserError, AssertionError):  # the record was changed
        layout = files.as_record(ParallelLayout, run.start.get("layout"), EVENTS)
    if layout is None:
        return [], []
    ranks = ranks_picture(layout, int(run.start.get("ranks_per_node") or layout.world_size))
    steps = pictures_of_run(run.folder, run.config, layout.dp) if layout.pp > 1 else ()
    return [Markup(ranks.svg())], [Markup(picture.svg()) for picture in steps]
