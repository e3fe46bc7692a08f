"""Draws a report of one run, or of several on common axes.

page.html says what stands where. The page carries the records, thinned; report.js draws them in the browser. The
layout and the pipeline are the pictures of the plan commands.
"""

import base64
import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megalite.config.user_files import as_record
from megalite.errors.problems import UserError, printable
from megalite.errors.words import plain, several
from megalite.layout.ranks import ParallelLayout
from megalite.layout.summary import header_lines
from megalite.observe import readable
from megalite.observe.event_words import words_of
from megalite.observe.report.comparison import differences, names_of, result_of, status_of, summary_of
from megalite.observe.run_data import RunData, Series
from megalite.plan.picture import STYLE
from megalite.plan.ranks import ranks_picture
from megalite.plan.timeline import pictures_of_run

HERE = Path(__file__).parent
SCRIPTS = (HERE / "charts.js", HERE / "report.js")
COLOURS = 10  # of picture.css
MOST_SHOWN = 12  # steps of which samples are shown
MOST_RANKS = 2**20  # of a layout that is drawn
RECENT = 25  # buckets of the step time that tell how long the rest takes
MOST_CELLS, MOST_COLUMNS, MOST_STEPS = 2048, 256, 90  # of a heat map: in all, experts in a row, steps in a row


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
    found.globals.update(script=script, style=style, policy=policy, words_of=words_of)
    found.filters |= {name: words for name, words in vars(readable).items() if callable(words)}
    found.filters |= {"moment": moment, "plain": plain, "several": several}
    return found


def moment(seconds: float) -> str:
    """A time in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def render(runs: Sequence[RunData], *, live: bool = False, compared: bool = False) -> str:
    """The whole page of one run, or of several that are `compared`. `live`: the run goes on, as the caller knows."""
    compared = compared or len(runs) > 1
    chosen, derived = differences(runs)
    names = names_of(runs, chosen)
    columns = [summary_of(run, layout_of(run)) for run in runs]
    return (
        environment()
        .get_template("page.html")
        .render(
            compared=compared,
            names=names,
            run=runs[0],
            summary=[(label, [column[label] for column in columns]) for label in columns[0]],
            chosen=[(name, [plain(value) for value in values]) for name, values in chosen],
            derived=[(name, [plain(value) for value in values]) for name, values in derived],
            records=inline_json(records_of(runs, names, chosen, compared)),
            **({} if compared else view_of(runs[0], live=live)),
        )
        .lstrip()
    )


def inline_json(records: Any) -> Markup:
    """JSON as the text of a script element, which nothing in it can end."""
    text = json.dumps(records, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


# --- what the script draws


def records_of(
    runs: Sequence[RunData], names: Sequence[str], chosen: Iterable[tuple[str, list[Any]]], compared: bool
) -> dict[str, Any]:
    """The records that report.js reads. Numbers by rank and of experts are those of a single run."""
    paces = [it.high / it.last for run in runs for it in run.series["tokens"].buckets if it.last > 0]
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
                "series": {key: _points(it) for key, it in run.series.items() if not key.startswith("layer/")},
                "not_finite": sorted(run.not_finite),
                **({} if compared else {"ranks": ranks_of(run), "experts": experts_of(run)}),
            }
            for run, name, result in zip(runs, names, results, strict=True)
        ],
    }


def ranks_of(run: RunData) -> dict[str, Any]:
    """Memory and computing time by rank, and which ranks were found slow."""
    by_rank = {"memory_gib": run.memory_gib, "compute_s": run.ranks.get("compute_s") or []}
    numbers = {name: [value if isfinite(value) else 0.0 for value in values] for name, values in by_rank.items()}
    return numbers | {"slow": sorted(run.slow)}


def _points(series: Series) -> list[list[float]]:
    """Step and mean of each bucket, and the least and greatest value where they differ."""
    points = [(it.x, it.y, it.low, it.high)[: 4 if it.low < it.high else 2] for it in series.buckets]
    return [[float(f"{value:.6g}") for value in point] for point in points if all(map(isfinite, point))]


def _simple(value: Any) -> Any:
    """A setting as the script shows it: a number, or words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return value if is_number else printable(plain(value))


def experts_of(run: RunData) -> dict[str, Any] | None:
    """The load of experts: of each layer over the steps, of each expert in all steps and in the newest. Where experts
    are very many, neighbours share a cell, of which the largest counts."""
    if not run.tokens:
        return None
    first, every = (int(run.config.get(f"model.moe.{name}") or 0) for name in ("first_dense_layers", "layer_freq"))
    counts = run.tokens[0]
    together = max(-(-sum(map(len, counts)) // MOST_CELLS), -(-len(counts[0]) // MOST_COLUMNS))

    def shares(row: Sequence[int]) -> list[float]:
        cells = (row[cell : cell + together] for cell in range(0, len(row), together))
        return [round(max(cell) / sum(row), 5) for cell in cells]

    layers = [run.series[f"layer/{layer}"].buckets for layer in range(len(counts))]
    step = -(-len(layers[0]) // MOST_STEPS)
    return {
        "layers": [first + at * (every or 1) for at in range(len(counts))],
        "count": len(counts[0]),
        "together": together,
        "until": run.tokens_until,
        "steps": [bucket.last for bucket in layers[0][::step]],
        "imbalance": [
            [round(max(bucket.high for bucket in row[at : at + step]), 3) for at in range(0, len(row), step)]
            for row in layers
        ],
        "all": [shares(row) for row in run.tokens[0]],
        "newest": [shares(row) for row in run.tokens[1]],
    }


# --- what the template shows of one run


def view_of(run: RunData, *, live: bool) -> dict[str, Any]:
    """Values of the template for one run."""
    at = time.time() if live else run.updated
    groups: dict[str, list[str]] = {}
    for name in run.config:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    layout = layout_of(run)
    recent = sorted(bucket.y for bucket in run.series["step_time_s"].buckets[-RECENT:])
    parts = {key.partition("/")[2]: it.mean for key, it in run.series.items() if key.startswith("time_split/")}
    training_s = run.last.get("training_s") or 0.0
    spent = {"training": training_s, "evaluation": run.evaluation_s, "checkpoints": run.stall_s}
    shown = sorted(run.samples, reverse=True)
    if len(shown) > MOST_SHOWN:
        shown = [shown[round(at * (len(shown) - 1) / (MOST_SHOWN - 1))] for at in range(MOST_SHOWN)]
    ranks, dp = (layout.world_size, layout.dp) if layout else (1, 1)
    per_node = int(run.start.get("ranks_per_node") or ranks)
    return {
        "title": f"{run.config.get('model.name') or 'model'} on {run.config.get('data.source') or 'data'}",
        "status": status_of(run, live=live),
        "done": min(1.0, run.step / run.steps) if run.steps else 1.0,
        "pace": recent[len(recent) // 2] if recent else None,  # the median time of a step
        "as_of": f"{moment(at)} {time.strftime('%Z', time.localtime(at))}",
        "step_parts": shares_of(parts, readable.step_time, range(COLOURS)),
        "run_parts": shares_of(spent, readable.duration, (1, 4, 5)),
        "layout_lines": header_lines(layout) if layout else [],
        "panels": [Markup(ranks_picture(layout, per_node).svg())] if layout else [],
        "pipeline": [Markup(picture.svg()) for picture in pictures_of_run(run.folder, run.config, dp)],
        "hosts": list(Counter(run.start.get("hosts") or []).items()),
        "samples": [(step, run.samples[step]) for step in shown],
        "groups": groups,
        "given": {word.lstrip("+").partition("=")[0] for start in run.starts for word in start.get("overrides") or []},
    }


def layout_of(run: RunData) -> ParallelLayout | None:
    """The layout of the newest start, if it was recorded."""
    with contextlib.suppress(UserError, AssertionError):  # the record was changed
        layout = as_record(ParallelLayout, run.start.get("layout"), "layout")
        return layout if layout.world_size <= MOST_RANKS else None
    return None


def shares_of(parts: Mapping[str, float], words: Any, colours: Iterable[int]) -> list[tuple[str, int, str, float]]:
    """Parts of a whole for a legend: name, colour, seconds in words, share. Empty where the whole is nothing."""
    whole = sum(parts.values())
    found = zip(parts.items(), colours, strict=False) if whole else ()
    return [(name, colour, words(seconds), seconds / whole) for (name, seconds), colour in found]
