"""The report of one run: report.html."""

import time
from collections.abc import Iterator, Sequence

from megalite.train import readable
from megalite.train.report import blocks
from megalite.train.report.axes import Words, percent, scientific
from megalite.train.report.charts import Line, Look, for_any_width, legend, line_chart, points_of
from megalite.train.report.data import RunData, as_text
from megalite.train.report.machines import layout_cards, memory_card, ranks_card
from megalite.train.report.markup import Markup, tag
from megalite.train.report.series import Series
from megalite.train.report.speed import time_card
from megalite.train.report.story import event_rows, status_of

WIDE = 1100.0, 300.0  # of the first chart
MOST_SHOWN = 12  # steps of which samples are shown
SAMPLES_OPEN = 3  # of them, the newest ones, unfolded


def render(run: RunData, *, live: bool = False) -> str:
    """The whole page. `live`: the run goes on, as whoever asks knows."""
    sections = [
        ("learning", "Learning", _learning(run)),
        ("speed", "Speed and memory", _speed(run)),
        ("samples", "Samples", list(_samples(run))),
        ("layout", "Layout", layout_cards(run)),
        ("events", "Events", list(_events(run))),
        ("start", "How it was started", _started(run)),
        ("settings", "Settings", list(_settings(run))),
    ]
    shown = [(name, title, parts) for name, title, parts in sections if parts]
    word, style = status_of(run, live=live)
    top = tag(
        "header",
        tag("div", tag("h1", title_of(run)), tag("span", word, class_=f"pill {style}"), class_="row"),
        tag("p", tag("code", str(run.folder)), class_="quiet"),
        _progress(run, live=live),
        blocks.tiles(_tiles(run)),
        blocks.links((name, title) for name, title, _ in shown),
        class_="top",
    )
    main = tag("main", *(blocks.section(name, title, *parts) for name, title, parts in shown))
    return blocks.document(f"{title_of(run)}: {word}", top, main, _footer(run))


def title_of(run: RunData) -> str:
    """What is trained on what."""
    return f"{run.setting('model.name') or 'model'} on {run.setting('data.source') or 'data'}"


def _progress(run: RunData, *, live: bool) -> Markup:
    done = min(1.0, run.step / run.steps) if run.steps else 1.0
    bar = tag("i", style=f"width:{100 * done:.1f}%")
    told = f"step {run.step:,} of {run.steps:,}"
    if run.end is None and done < 1 and (pace := _recent(run.figures["step_time_s"])) is not None:
        told += f", {readable.duration(pace * (run.steps - run.step))} left"
    at = time.time() if live else run.updated
    words = f"{told}; as of {blocks.moment(at)} {time.strftime('%Z', time.localtime(at))}"
    return tag("div", tag("div", bar, class_="progress"), tag("small", words))


def _tiles(run: RunData) -> Iterator[tuple[str, str, str]]:
    loss, evaluation = run.last.get("loss"), run.evaluation
    yield (
        "training loss",
        *(("", "") if loss is None else (readable.loss(loss), f"from {readable.loss(run.first_loss or 0)}")),
    )
    if run.best is not None:
        step, best = run.best
        newest = evaluation["val_loss"]
        below = "the best so far" if best == newest else f"best {readable.loss(best)} at step {step:,}"
        yield "validation loss", readable.loss(newest), below
        perplexity = evaluation.get("val_perplexity")
        yield "perplexity", "" if perplexity is None else readable.perplexity(perplexity), ""
        bits = evaluation.get("val_bits_per_byte")
        yield "bits per byte", "" if bits is None else readable.loss(bits), ""
    if "tokens" in run.last:
        yield "tokens", readable.rate(float(run.last["tokens"])), f"in {readable.duration(run.training_s)} of training"
    speed, pace = _recent(run.figures["tokens_per_s"]), _recent(run.figures["step_time_s"])
    if speed is not None and pace is not None:
        yield "tokens/s", readable.rate(speed), f"{readable.step_time(pace)} per step"
    if (mfu := _recent(run.figures["mfu"])) is not None:
        yield "MFU", readable.percent(mfu), "full attention counted"
    memory = run.ranks.get("memory_gib") or [run.last["memory_gib"]] if "memory_gib" in run.last else []
    if memory:
        yield "peak memory, GiB", readable.gibibytes(max(memory)), "of the fullest rank" if len(memory) > 1 else ""
    if run.last.get("bad_steps"):
        yield "bad steps", f"{run.last['bad_steps']:,}", "not applied"


def _recent(series: Series) -> float | None:
    """The median of the newest part of a figure."""
    newest = sorted(series[at].mean for at in range(max(0, len(series) - 25), len(series)))
    return newest[len(newest) // 2] if newest else None


def _learning(run: RunData) -> list[Markup]:
    figures = run.figures
    lines = [
        Line("training", points_of(figures["loss"]), 0, readable.loss, smooth=True),
        Line("validation", points_of(figures["val_loss"]), 1, readable.loss, dots=True),
    ]
    entries = [(line.name, line.colour, "") for line in lines if line.points]
    look = Look(unit="nats per token")
    chart = for_any_width(lambda its: line_chart(lines, "loss", its), look, *WIDE)
    parts = [blocks.card("Loss", legend(entries), chart, wide=True)]
    parts.append(_chart("Learning rate", figures["lr"], scientific, Look(from_zero=True, tick=scientific)))
    parts.append(_chart("Gradient norm", figures["grad_norm"], readable.loss, Look(steep=True), smooth=True))
    if len(figures["val_bits_per_byte"]):
        series = figures["val_bits_per_byte"]
        parts.append(_chart("Bits per byte, validation", series, readable.loss, Look(), colour=1, dots=True))
    if len(figures["loss_scale"]):
        parts.append(_chart("Loss scale", figures["loss_scale"], lambda value: f"{value:g}", Look(steep=True)))
    return [blocks.cards(*parts)]


def _chart(
    title: str, series: Series, words: Words, look: Look, *, colour: int = 0, smooth: bool = False, dots: bool = False
) -> Markup:
    line = Line(title.lower(), points_of(series), colour, words, smooth=smooth, dots=dots)
    return blocks.card(title, line_chart([line], title.lower(), look))


def _speed(run: RunData) -> list[Markup]:
    figures = run.figures
    look = Look(from_zero=True)
    parts = [_chart("Tokens per second", figures["tokens_per_s"], readable.rate, look, colour=2, smooth=True)]
    if len(figures["mfu"]):
        lines = [
            Line("full attention", points_of(figures["mfu"]), 0, readable.percent, smooth=True),
            Line("causal half", points_of(figures["mfu_causal"]), 4, readable.percent, smooth=True),
        ]
        share = Look(from_zero=True, tick=percent)
        entries = [(line.name, line.colour, "") for line in lines]
        parts.append(blocks.card("Model FLOPs utilisation", legend(entries), line_chart(lines, "MFU", share)))
    parts += [*memory_card(run), *ranks_card(run), *time_card(run)]
    return [blocks.cards(*parts)]


def _samples(run: RunData) -> Iterator[Markup]:
    steps = sorted({step for step, _ in run.samples})
    if len(steps) > MOST_SHOWN:
        steps = sorted({steps[round(at * (len(steps) - 1) / (MOST_SHOWN - 1))] for at in range(MOST_SHOWN)})
    for place, step in enumerate(reversed(steps)):
        texts = [blocks.quoted(prompt, text) for (at, prompt), text in run.samples.items() if at == step]
        yield blocks.folded(f"after step {step:,}", *texts, unfolded=place < SAMPLES_OPEN)
    if steps:
        yield tag("p", "What the model writes after each prompt (bold), with one seed for all steps.", class_="quiet")


def _events(run: RunData) -> Iterator[Markup]:
    rows = list(event_rows(run))
    if rows:
        yield tag("div", blocks.table(("time", "step", "what", ""), rows), class_="card")
    if run.kinds["checkpoint"]:
        count, newest = run.kinds["checkpoint"], run.checkpoint
        size, took = readable.size(newest.get("bytes") or 0), readable.step_time(newest.get("seconds") or 0.0)
        written = f"{count:,} checkpoints were written" if count > 1 else "1 checkpoint was written"
        held = f"All together held training up for {readable.duration(run.stall_s)}."
        yield tag("p", f"{written}; the newest, of step {newest['step']:,}, holds {size} and took {took}. {held}")


def _started(run: RunData) -> list[Markup]:
    start, parts = run.start, list[Markup]()
    if not start:
        return []
    rows = [(label, text) for label, text in start.get("about", []) if label or text]
    if rows:
        parts.append(blocks.card("", blocks.facts(rows), wide=True))
    if start.get("command"):
        parts.append(blocks.card("Command", tag("pre", str(start["command"])), wide=True))
    overrides = start.get("overrides") or []
    given = [tag("code", str(word)) for word in overrides] or [tag("span", "none: every setting has its default")]
    parts.append(blocks.card("Overrides", tag("p", blocks.listed(given, ", ")), wide=True))
    versions = start.get("versions") or {}
    if versions:
        parts.append(blocks.card("Versions", blocks.facts((str(name), str(value)) for name, value in versions.items())))
    return [blocks.cards(*parts)]


def _settings(run: RunData) -> Iterator[Markup]:
    """All of them, those of the command line in bold."""
    given = {str(word).lstrip("+").partition("=")[0] for word in run.start.get("overrides") or []}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in run.config.items():
        groups.setdefault(name.rpartition(".")[0], []).append((name, as_text(value)))
    tables = []
    for group, settings in groups.items():
        body = [
            tag(
                "tr",
                tag("th", name, scope="row", class_="set" if name in given else None),
                tag("td", tag("code", text)),
            )
            for name, text in settings
        ]
        tables.append(blocks.card(group or "run", tag("div", tag("table", tag("tbody", *body)), class_="scroll")))
    if tables:
        yield blocks.folded(f"{len(run.config)} settings, as resolved", blocks.cards(*tables))


def _footer(run: RunData) -> Markup:
    words: Sequence[str] = (
        "Written by megalite. ",
        tag("code", "python scripts/report.py RUN_DIR"),
        " draws it again, with several folders it compares runs. The figures are in metrics.jsonl, the events in "
        "events.jsonl.",
    )
    return tag("footer", *words)
