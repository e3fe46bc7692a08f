"""Several runs on common axes, and the settings in which they differ."""

from collections.abc import Callable, Iterator, Sequence

from megalite.train import readable
from megalite.train.report import blocks
from megalite.train.report.axes import Words, percent, scientific
from megalite.train.report.charts import COLOURS, Line, Look, legend, line_chart, points_of
from megalite.train.report.data import EVALUATED, RunData, as_text
from megalite.train.report.machines import layout_of
from megalite.train.report.markup import Markup, tag
from megalite.train.report.series import Series
from megalite.train.report.story import status_of

UNREMARKABLE = ("run_dir", "resume")
SIDE_BY_SIDE = 6  # more runs than that have no room for their values beside each other in a tip
CHARTS: tuple[tuple[str, str, Words, Look, bool], ...] = (
    ("Training loss", "loss", readable.loss, Look(unit="nats per token"), True),
    ("Validation loss", "val_loss", readable.loss, Look(unit="nats per token"), False),
    ("Bits per byte, validation", "val_bits_per_byte", readable.loss, Look(), False),
    ("Learning rate", "lr", scientific, Look(from_zero=True, tick=scientific), False),
    ("Gradient norm", "grad_norm", readable.loss, Look(steep=True), True),
    ("Tokens per second", "tokens_per_s", readable.rate, Look(from_zero=True), True),
    ("Time of a step", "step_time_s", readable.step_time, Look(unit="seconds", from_zero=True), True),
    ("MFU", "mfu", readable.percent, Look(from_zero=True, tick=percent), True),
)


def compare(runs: Sequence[RunData]) -> str:
    """The whole page."""
    names = names_of(runs)
    marks = [(name, at % COLOURS, "") for at, name in enumerate(names)]
    top = tag(
        "header",
        tag("h1", f"{len(runs)} runs compared"),
        legend(marks),
        blocks.links([("curves", "Curves"), ("summary", "Summary"), ("settings", "Different settings")]),
        class_="top",
    )
    main = tag(
        "main",
        blocks.section("curves", "Curves", blocks.cards(*_charts(runs, names))),
        blocks.section("summary", "Summary", tag("div", _summary(runs, names), class_="card")),
        blocks.section("settings", "Different settings", tag("div", _differences(runs, names), class_="card")),
    )
    footer = tag("footer", "Written by megalite: ", tag("code", "python scripts/report.py RUN_DIR RUN_DIR"))
    return blocks.document(f"{len(runs)} runs compared", top, main, footer)


def names_of(runs: Sequence[RunData]) -> list[str]:
    """As much of each folder's path as tells the runs apart."""
    paths = [run.folder.absolute() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _charts(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Markup]:
    for title, figure, words, look, smooth in CHARTS:
        series = [run.figures[figure] for run in runs]
        if any(map(len, series)):
            yield _card(title, names, series, words, look, smooth=smooth, dots=figure in EVALUATED)
    counted = [run.last["tokens"] / run.last["step"] for run in runs if run.last.get("tokens")]
    if len(counted) == len(runs) and max(counted) > 1.001 * min(counted):
        for title, figure, words, look, smooth in CHARTS[:2]:
            series = [run.figures[figure] for run in runs]
            over = Look(unit=look.unit, over="token")
            dots = figure in EVALUATED
            if any(map(len, series)):
                yield _card(f"{title} over tokens", names, series, words, over, counted, smooth=smooth, dots=dots)


def _card(
    title: str,
    names: Sequence[str],
    series: Sequence[Series],
    words: Words,
    look: Look,
    scales: Sequence[float] | None = None,
    *,
    smooth: bool,
    dots: bool,
) -> Markup:
    lines = [
        Line(name, points_of(each, scales[at] if scales else 1.0), at % COLOURS, words, smooth=smooth, dots=dots)
        for at, (name, each) in enumerate(zip(names, series, strict=True))
    ]
    if len(lines) > SIDE_BY_SIDE:
        lines = [Line(line.name[-12:], line.points, line.colour, words, smooth=smooth) for line in lines]
    return blocks.card(title, line_chart(lines, title.lower(), look))


Cell = Callable[[RunData], str]
SUMMARY: tuple[tuple[str, Cell], ...] = (
    ("status", lambda run: status_of(run, live=False)[0]),
    ("steps", lambda run: f"{run.step:,} of {run.steps:,}"),
    ("tokens", lambda run: readable.rate(float(run.last["tokens"])) if "tokens" in run.last else "-"),
    ("training loss", lambda run: readable.loss(run.last["loss"]) if "loss" in run.last else "-"),
    ("best validation loss", lambda run: "-" if run.best is None else readable.loss(run.best[1])),
    ("at step", lambda run: "-" if run.best is None else f"{run.best[0]:,}"),
    ("tokens/s", lambda run: _middle(run.figures["tokens_per_s"], readable.rate)),
    ("MFU", lambda run: _middle(run.figures["mfu"], readable.percent)),
    ("time in training", lambda run: readable.duration(run.training_s)),
    ("peak memory, GiB", lambda run: _memory(run)),
    ("bad steps", lambda run: f"{run.last.get('bad_steps', 0):,}"),
    ("ranks", lambda run: _ranks(run)),
    ("device", lambda run: str(run.start.get("device") or "-")),
)


def _summary(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    return blocks.table(["", *names], [[label, *map(cell, runs)] for label, cell in SUMMARY], figures=True)


def _differences(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    """Settings that are not equal in all runs; a dash where a run does not know one."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = [as_text(run.config[name]) if name in run.config else "-" for run in runs]
        if len(set(values)) > 1 and name not in UNREMARKABLE:
            rows.append([name, *(tag("code", value) for value in values)])
    return blocks.table(["setting", *names], rows) if rows else tag("p", "none", class_="quiet")


def _middle(series: Series, words: Words) -> str:
    means = sorted(bucket.mean for bucket in series)
    return words(means[len(means) // 2]) if means else "-"


def _memory(run: RunData) -> str:
    by_rank = run.ranks.get("memory_gib") or [run.last.get("memory_gib") or 0.0]
    return readable.gibibytes(max(by_rank))


def _ranks(run: RunData) -> str:
    layout = layout_of(run)
    return "-" if layout is None else f"{layout.world_size}"
