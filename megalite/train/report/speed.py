"""Where a run's time goes: within a step, and over the whole run."""

from collections.abc import Iterator
from functools import partial

from megalite.train import readable
from megalite.train.records import PARTS
from megalite.train.report import blocks
from megalite.train.report.axes import percent
from megalite.train.report.charts import Look, for_any_width, legend, share_chart
from megalite.train.report.data import RunData
from megalite.train.report.markup import Markup, tag

TOLD = (
    "Of rank 0, in the steps that are logged. Communication is what waits for other ranks: transfers between stages "
    "(with the pipeline's bubble), sums of gradients, parameters. Sums inside tensor-parallel layers are part of "
    "forward and backward; train.profile_steps shows them apart."
)


def time_card(run: RunData) -> Iterator[Markup]:
    """The parts of a step, over the steps, and their means; then what else the run spent time on."""
    series = [run.split[part] for part in PARTS if part in run.split]
    if len(series) < len(PARTS) or not len(series[0]):
        return
    parts = [(part, [bucket.mean for bucket in run.split[part]]) for part in PARTS]
    means = [_mean(run, part) for part in PARTS]
    entries = [
        (part, colour, f"{readable.step_time(mean)}, {readable.percent(mean / (sum(means) or 1.0))}")
        for colour, (part, mean) in enumerate(zip(PARTS, means, strict=True))
    ]
    steps = [bucket.at for bucket in series[0]]
    draw = partial(share_chart, parts, steps, "time split")
    chart = for_any_width(draw, Look(tick=percent), 640.0, 250.0)
    told = tag("div", legend(entries), tag("p", tag("small", TOLD)), *_whole_run(run))
    yield blocks.card("Time of a step", tag("div", chart, told, class_="beside"), wide=True)


def _whole_run(run: RunData) -> Iterator[Markup]:
    """Training, evaluation and checkpoints, as one bar."""
    spent = [("training", run.training_s), ("evaluation", run.evaluation_s), ("checkpoints", run.stall_s)]
    total = sum(seconds for _, seconds in spent)
    if not total:
        return
    colours = (1, 4, 5)
    bar = tag(
        "div",
        *(
            tag("i", class_=f"b{colour}", style=f"width:{100 * seconds / total:.2f}%")
            for colour, (_, seconds) in zip(colours, spent, strict=True)
        ),
        class_="bar",
        role="img",
        aria_label=", ".join(f"{name} {readable.percent(seconds / total)}" for name, seconds in spent),
    )
    entries = [
        (name, colour, f"{readable.duration(seconds)}, {readable.percent(seconds / total)}")
        for colour, (name, seconds) in zip(colours, spent, strict=True)
    ]
    yield tag("h3", "The whole run")
    yield bar
    yield legend(entries)


def _mean(run: RunData, part: str) -> float:
    """Over all steps that were logged."""
    buckets = list(run.split[part])
    return sum(bucket.total for bucket in buckets) / sum(bucket.count for bucket in buckets)
