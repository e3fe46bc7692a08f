"""Draws the report of one run, report.html: templates/run.html says what stands where, the figures are from here."""

import base64
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megalite.config.user_files import as_record
from megalite.errors.problems import UserError, printable
from megalite.errors.words import plain, several
from megalite.layout.ranks import ParallelLayout
from megalite.layout.summary import header_lines
from megalite.observe import readable
from megalite.observe.event_words import words_of
from megalite.observe.report.charts import COLOURS, Chart, Figure, Line, column_chart, line_chart, share_chart
from megalite.observe.report.heat_map import heat_map
from megalite.observe.run_data import RunData
from megalite.plan.picture import STYLE
from megalite.plan.ranks_picture import panels_of

HERE = Path(__file__).parent
MOST_SHOWN = 12  # steps of which samples are shown
MOST_RANKS = 2**20  # of a layout that is drawn
RECENT = 25  # buckets of the step time that tell how long the rest takes
FIGURES = {
    "loss": Figure("Training loss", unit="nats per token", smooth=True),
    "val_loss": Figure("Validation loss", unit="nats per token", colour=1, dots=True),
    "val_bits_per_byte": Figure("Bits per byte, validation", colour=1, dots=True),
    "lr": Figure("Learning rate", readable.short, from_zero=True),
    "grad_norm": Figure("Gradient norm", smooth=True),
    "loss_scale": Figure("Loss scale", plain),
    "tokens_per_s": Figure("Tokens per second", readable.rate, colour=2, from_zero=True, smooth=True),
    "step_time_s": Figure("Time of a step", readable.step_time, "seconds", from_zero=True, smooth=True),
    "mfu": Figure("MFU", readable.percent, from_zero=True, share=True, smooth=True),
    "mfu_causal": Figure("MFU", colour=4, smooth=True),
    "memory_gib": Figure("Peak memory", readable.gibibytes, "GiB", colour=5, from_zero=True),
    "moe/imbalance_max": Figure("Load imbalance", colour=1, smooth=True),
    "moe/imbalance_mean": Figure("Load imbalance", smooth=True),
    "moe/balancing_loss": Figure("Balancing loss", smooth=True),
    "moe/z_loss": Figure("Router z-loss", smooth=True),
    "moe/dropped_share": Figure("Dropped choices", readable.percent, from_zero=True, share=True, smooth=True),
    "moe/entropy": Figure("Router entropy", unit="nats per token", smooth=True),
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
    script, *styles = (
        Markup(path.read_text(encoding="utf-8")) for path in (HERE / "charts.js", HERE / "report.css", STYLE)
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    found.globals.update(
        script=script, style=Markup("").join(styles), policy=policy, figures=FIGURES, column_chart=column_chart
    )
    found.globals["words_of"] = words_of
    found.filters |= {name: words for name, words in vars(readable).items() if callable(words)} | {"moment": moment}
    found.filters |= {"plain": plain, "several": several}
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
    layout, recent = layout_of(run), sorted(bucket.y for bucket in run.figures["step_time_s"].buckets[-RECENT:])
    spent = {"training": run.training_s, "evaluation": run.evaluation_s, "checkpoints": run.stall_s}
    per_node = int(run.start.get("ranks_per_node") or (layout.world_size if layout else 1))
    shown = sorted(run.samples, reverse=True)
    if len(shown) > MOST_SHOWN:
        shown = [shown[round(at * (len(shown) - 1) / (MOST_SHOWN - 1))] for at in range(MOST_SHOWN)]
    return (
        environment()
        .get_template("run.html")
        .render(
            run=run,
            title=f"{run.config.get('model.name') or 'model'} on {run.config.get('data.source') or 'data'}",
            status=status_of(run, live=live),
            done=min(1.0, run.step / run.steps) if run.steps else 1.0,
            pace=recent[len(recent) // 2] if recent else None,  # the median time of a step
            as_of=f"{moment(at)} {time.strftime('%Z', time.localtime(at))}",
            chart_of=partial(chart_of, run),
            time_split=share_chart("time split", {part: series.buckets for part, series in run.split.items()}),
            step_parts=shares({part: it.mean for part, it in run.split.items()}, readable.step_time, range(COLOURS)),
            run_parts=shares(spent, readable.duration, (1, 4, 5)),
            layout=layout,
            layout_lines=header_lines(layout) if layout else [],
            pictures=[Markup(it.svg()) for it in panels_of(layout, per_node)] if layout else [],
            hosts=list(Counter(run.start.get("hosts") or []).items()),
            tokens_of_experts=heat_map(run),
            samples=[(step, run.samples[step]) for step in shown],
            groups=groups,
            given={word.lstrip("+").partition("=")[0] for start in run.starts for word in start.get("overrides") or []},
        )
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
    with contextlib.suppress(UserError, AssertionError):  # the record was changed
        layout = as_record(ParallelLayout, run.start.get("layout"), "layout")
        return layout if layout.world_size <= MOST_RANKS else None
    return None


def chart_of(run: RunData, title: str, names: Mapping[str, str], width: float = 380.0) -> Chart | None:
    """A chart of some figures: their lines by name."""
    lines = [Line(name, run.figures[key].buckets, FIGURES[key], FIGURES[key].colour) for key, name in names.items()]
    return line_chart(title, lines, width=width, height=300.0 if width > 380 else 225.0)


def shares(
    parts: Mapping[str, float], words: Callable[[float], str], colours: Iterable[int]
) -> list[tuple[str, int, str, float]]:
    """Parts of a whole for a legend: name, colour, seconds in words, share. Empty where the whole is nothing."""
    whole = sum(parts.values())
    found = zip(parts.items(), colours, strict=False) if whole else ()
    return [(name, colour, words(seconds), seconds / whole) for (name, seconds), colour in found]
