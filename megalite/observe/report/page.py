"""Draws the report of one run, report.html: templates/run.html says what stands where, the figures are from here."""

import base64
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megalite.config.user_files import as_record
from megalite.errors.problems import collect, printable
from megalite.layout.ranks import ParallelLayout
from megalite.layout.summary import header_lines
from megalite.observe import readable
from megalite.observe.report.axes import short
from megalite.observe.report.charts import COLOURS, Chart, Line, Look, column_chart, line_chart, share_chart
from megalite.observe.report.layout_picture import layout_pictures
from megalite.observe.run_data import FIRST, RunData, Series

HERE = Path(__file__).parent
MOST_SHOWN = 12  # steps of which samples are shown
RECENT = 25  # buckets of the step time that tell how long the rest takes


@dataclass(frozen=True)
class Figure:
    """How a figure of metrics.jsonl is drawn."""

    title: str
    look: Look
    colour: int = 0
    dots: bool = False
    smooth: bool = False


FIGURES = {
    "loss": Figure("Training loss", Look(unit="nats per token"), smooth=True),
    "val_loss": Figure("Validation loss", Look(unit="nats per token"), 1, dots=True),
    "val_bits_per_byte": Figure("Bits per byte, validation", Look(), 1, dots=True),
    "lr": Figure("Learning rate", Look(short, from_zero=True)),
    "grad_norm": Figure("Gradient norm", Look(), smooth=True),
    "loss_scale": Figure("Loss scale", Look(readable.setting)),
    "tokens_per_s": Figure("Tokens per second", Look(readable.rate, from_zero=True), 2, smooth=True),
    "step_time_s": Figure("Time of a step", Look(readable.step_time, "seconds", from_zero=True), smooth=True),
    "mfu": Figure("MFU", Look(readable.percent, from_zero=True, share=True), smooth=True),
    "mfu_causal": Figure("MFU", Look(), 4, smooth=True),
    "memory_gib": Figure("Peak memory", Look(readable.gibibytes, "GiB", from_zero=True), 5),
}


@cache
def environment() -> Environment:
    """The templates. Nothing that comes from a run is ever markup, and a page runs our script alone."""
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("charts.js", "report.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    found.globals.update(script=script, style=style, policy=policy)
    written = ["count", "duration", "gibibytes", "loss", "percent", "perplexity", "rate", "setting", "several", "size"]
    found.filters |= {name: getattr(readable, name) for name in [*written, "step_time"]} | {"moment": moment}
    return found


def moment(seconds: float) -> str:
    """A time in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def render(run: RunData, *, live: bool = False) -> str:
    """The whole page. `live`: the run goes on, as the caller knows."""
    at = time.time() if live else run.updated
    groups: dict[str, list[str]] = {}
    for name in run.config:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    overrides = [str(word) for start in run.starts for word in start.get("overrides") or []]
    layout = layout_of(run)
    step = {part: series.mean for part, series in run.split.items()}
    spent = {"training": run.training_s, "evaluation": run.evaluation_s, "checkpoints": run.stall_s}
    page = environment().get_template("run.html")
    return page.render(
        run=run,
        title=f"{run.config.get('model.name') or 'model'} on {run.config.get('data.source') or 'data'}",
        status=status_of(run, live=live),
        done=min(1.0, run.step / run.steps) if run.steps else 1.0,
        pace=_pace(run.figures["step_time_s"]),
        as_of=f"{moment(at)} {time.strftime('%Z', time.localtime(at))}",
        figures=FIGURES,
        chart_of=partial(chart_of, run),
        column_chart=column_chart,
        time_split=share_chart("time split", {part: series.buckets for part, series in run.split.items()}),
        step_parts=shares(step, readable.step_time, range(COLOURS)),
        run_parts=shares(spent, readable.duration, (1, 4, 5)),
        layout=layout,
        layout_lines=header_lines(layout) if layout else [],
        pictures=layout_pictures(layout, int(run.start.get("ranks_per_node") or layout.world_size)) if layout else [],
        hosts=list(Counter(run.start.get("hosts") or []).items()),
        samples=_samples(run),
        first=FIRST,
        groups=groups,
        given={word.lstrip("+").partition("=")[0] for word in overrides},
    )


def status_of(run: RunData, *, live: bool) -> tuple[str, str]:
    """How a run stands, in a word, and the style of that word."""
    if run.end is None:
        return ("running", "run") if live else ("not ended" if run.starts else "end unknown", "warn")
    kind = str(run.end["kind"])
    if kind != "failed" and run.end.get("status"):
        return f"{kind}, not saved", "bad"
    return kind, {"finished": "good", "failed": "bad"}.get(kind, "warn")


def layout_of(run: RunData) -> ParallelLayout | None:
    """The layout of the newest start, if it was recorded."""
    recorded = run.start.get("layout")
    return collect(lambda: as_record(ParallelLayout, recorded, "layout"), []) if recorded else None


def chart_of(run: RunData, title: str, names: Mapping[str, str], **size: float) -> Chart | None:
    """A chart of some figures: their lines by name. The first figure decides how the chart looks."""
    figures = [(FIGURES[name], run.figures[name].buckets, called) for name, called in names.items()]
    lines = [Line(called, points, it.colour, it.dots, it.smooth) for it, points, called in figures]
    return line_chart(title, lines, replace(figures[0][0].look, **size))  # type: ignore[arg-type]


def shares(
    parts: Mapping[str, float], words: Callable[[float], str], colours: Iterable[int]
) -> list[tuple[str, int, str, float]]:
    """Parts of a whole for a legend: name, colour, seconds in words, share. Empty where the whole is nothing."""
    whole = sum(parts.values())
    found = zip(parts.items(), colours, strict=False) if whole else ()
    return [(name, colour, words(seconds), seconds / whole) for (name, seconds), colour in found]


def _pace(step_time: Series) -> float | None:
    """The median time of the newest steps."""
    newest = sorted(bucket.y for bucket in step_time.buckets[-RECENT:])
    return newest[len(newest) // 2] if newest else None


def _samples(run: RunData) -> list[tuple[int, dict[str, str]]]:
    """Steps, the newest first, with their texts by prompt."""
    steps = sorted(run.samples)
    if len(steps) > MOST_SHOWN:
        steps = sorted({steps[round(at * (len(steps) - 1) / (MOST_SHOWN - 1))] for at in range(MOST_SHOWN)})
    return [(step, run.samples[step]) for step in reversed(steps)]
