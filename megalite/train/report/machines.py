"""Where a run computes: its layout as pictures, its hosts, and the memory and speed of each rank."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from megalite.parallel.layout import ParallelLayout
from megalite.parallel.tables import header_lines
from megalite.train import readable
from megalite.train.report import blocks
from megalite.train.report.charts import Line, Look, column_chart, line_chart, points_of
from megalite.train.report.data import RunData
from megalite.train.report.layout_picture import layout_pictures
from megalite.train.report.markup import Markup, tag

MOST_HOSTS = 12  # that are named


def layout_of(run: RunData) -> ParallelLayout | None:
    """The layout of the newest start, if it was recorded."""
    told = run.start.get("layout")
    known = {field.name for field in fields(ParallelLayout)}
    return ParallelLayout(**told) if isinstance(told, dict) and set(told) <= known else None


def layout_cards(run: RunData) -> list[Markup]:
    """A picture for each axis, and where the ranks are."""
    layout = layout_of(run)
    if layout is None:
        return []
    per_node = int(run.start.get("ranks_per_node") or layout.world_size)
    lines = [tag("p", line) for line in header_lines(layout)]
    hosts = Counter(str(host) for host in run.start.get("hosts") or [])
    if hosts:
        named = [f"{host} ({count} rank{'s' if count > 1 else ''})" for host, count in hosts.items()][:MOST_HOSTS]
        more = f" and {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else ""
        lines.append(tag("p", f"on {', '.join(named)}{more}", class_="quiet"))
    pictures = [tag("div", picture, class_="card") for picture in layout_pictures(layout, per_node)]
    return [*lines, blocks.cards(*pictures)]


def memory_card(run: RunData) -> Iterator[Markup]:
    """Peak memory by rank or, where ranks have not told each other yet, of rank 0 over the steps."""
    memory = run.ranks.get("memory_gib") or []
    if len(memory) > 1:
        chart = column_chart(memory, "peak memory by rank", readable.gibibytes, Look(unit="GiB"))
        told = f"Until step {run.ranks['step']:,}."
        yield blocks.card("Peak memory by rank", chart, tag("p", tag("small", told)))
    elif len(run.figures["memory_gib"]):
        line = Line("memory", points_of(run.figures["memory_gib"]), 5, lambda gib: f"{gib:.2f} GiB")
        chart = line_chart([line], "peak memory", Look(unit="GiB", from_zero=True))
        yield blocks.card("Peak memory", chart)


def ranks_card(run: RunData) -> Iterator[Markup]:
    """How long each rank computes in a step: who is slow stands out."""
    compute = run.ranks.get("compute_s") or []
    if len(compute) > 1 and max(compute) > 0:
        slow = [rank for rank in run.slow if rank < len(compute)]
        look = Look(unit="seconds", from_zero=True)
        chart = column_chart(compute, "computing time by rank", readable.step_time, look, marked=slow)
        told = "Of a step, without waiting for others; medians of the steps before step "
        yield blocks.card("Computing time by rank", chart, tag("p", tag("small", f"{told}{run.ranks['step']:,}.")))
