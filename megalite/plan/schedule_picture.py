"""Draws a timeline: a row for each pipeline rank, a box for each action, its microbatch inside where it fits.

Simulated and recorded times look alike.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from megalite.pipeline.actions import ActionKind
from megalite.plan.drawing import DPI, GREY, INK, legend, mixed, page
from megalite.plan.timeline import Timeline, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS: dict[ActionKind, tuple[str, str]] = {
    "forward": ("forward", "#2f6fb5"),
    "backward": ("backward", "#2a9a58"),
    "backward-input": ("backward: gradients of activations", "#2a9a58"),
    "backward-weight": ("backward: gradients of weights", "#e38a2d"),
}
IDLE = "#eef0f3"
NARROWEST, WIDEST, MICROBATCH = 7.0, 15.0, 1.05  # of all rows; of a microbatch's boxes, where there is room
ROW, HIGHEST, NAMED = 0.36, 9.0, 0.13  # a row; all rows; rows lower than this are named one in eight
BOX = 0.83  # of a row's height
THIN = 0.02  # boxes narrower than this become an image
LIGHTEST = 0.72  # share of white in the last of several chunks


def figure_of(timeline: Timeline, unit: Unit, title: str) -> "Figure":
    """The whole picture as a matplotlib figure."""
    pp, span = timeline.pp, timeline.makespan or 1
    row = min(ROW, HIGHEST / pp)
    # Where there is room, all schedules of one model and batch have one scale.
    work = timeline.computing / (pp * max(timeline.microbatches, 1))
    wide = min(max(MICROBATCH * timeline.makespan / work if work else 0, NARROWEST), WIDEST)
    figure, axes = page([title, timeline.summary(unit)], wide, row * pp, beside=(0.4, 1.3), below=0.85)
    axes.set(xlim=(0, span * unit.scale), ylim=(pp - 0.5, -0.5))
    longest = max((len(spans) for spans in timeline.ranks), default=0)
    if wide < THIN * longest:
        _image(axes, timeline, unit, wide)
    else:
        _boxes(axes, timeline, unit, wide / span if row > NAMED else 0)
    axes.set_axis_on()
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.tick_params("x", labelsize=8, colors=GREY)
    axes.set_xlabel(f"time, in {unit.words}", size=8.5, color=GREY)
    named = range(0, pp, 1 if row >= NAMED else 8)
    held = axes.secondary_yaxis("right")
    held.spines["right"].set_visible(False)
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    held.set_yticks(named, [timeline.held(rank) for rank in named])
    for side in (axes, held):
        side.tick_params("y", length=0, labelcolor=INK, labelsize=9 if row > 0.2 else 7)
    heading = "holds at most the\nactivations of"
    axes.annotate(heading, (1, 1), (8, 4), "axes fraction", "offset points", va="bottom", size=8, color=GREY)
    _legend(figure, timeline)
    return figure


def _boxes(axes: "Axes", timeline: Timeline, unit: Unit, inches: float) -> None:
    """A shape for each action, and its microbatch where `inches` to a unit of time leave room for it."""
    for rank, spans in enumerate(timeline.ranks):
        low = rank - BOX / 2
        axes.broken_barh([(0, timeline.makespan * unit.scale)], (low, BOX), facecolors=IDLE)
        times = [(start * unit.scale, (end - start) * unit.scale) for _, start, end in spans]
        colours = [_shade(action.kind, action.chunk, timeline.vpp) for action, _, _ in spans]
        axes.broken_barh(times, (low, BOX), facecolors=colours, edgecolors="white", linewidths=0.5)
        for (action, start, end), (left, width) in zip(spans, times, strict=True):
            text = str(action.microbatch)
            if (end - start) * inches >= 0.066 * len(text) + 0.05:
                colour = INK if _white(action.chunk, timeline.vpp) > 0.3 else "white"
                axes.text(left + width / 2, rank, text, ha="center", va="center_baseline", size=7.5, color=colour)


def _image(axes: "Axes", timeline: Timeline, unit: Unit, wide: float) -> None:
    """Of actions that are narrower than a few points of the picture, each point shows the mean colour."""
    import numpy as np
    from matplotlib.colors import to_rgb

    edges = np.linspace(0, timeline.makespan, round(wide * DPI) + 1)
    image = np.empty((timeline.pp, len(edges) - 1, 3))
    image[:] = to_rgb(IDLE)
    for rank, spans in enumerate(timeline.ranks):
        times = defaultdict[tuple[ActionKind, int], list[tuple[float, float]]](list)
        for action, start, end in spans:
            times[action.kind, action.chunk].append((start, end))
        for (kind, chunk), each in times.items():
            covered = np.repeat(np.cumsum([0.0, *(end - start for start, end in each)]), 2)[1:-1]
            share = np.diff(np.interp(edges, np.ravel(each), covered)) / np.diff(edges)
            image[rank] += share[:, None] * np.subtract(to_rgb(_shade(kind, chunk, timeline.vpp)), to_rgb(IDLE))
    extent = (0, timeline.makespan * unit.scale, timeline.pp - 0.5, -0.5)
    axes.imshow(image.clip(0, 1), extent=extent, aspect="auto", interpolation="nearest")
    axes.hlines(np.arange(1, timeline.pp) - 0.5, 0, extent[1], colors="white", linewidths=0.7)


def _legend(figure: "Figure", timeline: Timeline) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    kinds = {span.action.kind for spans in timeline.ranks for span in spans}
    chunks = f", chunks 0-{timeline.vpp - 1}" if timeline.vpp > 1 else ""
    entries: dict[str, Any] = {
        f"{words}{chunks}": tuple(Patch(facecolor=_shade(kind, chunk, timeline.vpp)) for chunk in range(timeline.vpp))
        for kind, (words, _) in LOOKS.items()
        if kind in kinds
    }
    entries["idle"] = Patch(facecolor=IDLE)
    side_by_side = {tuple: HandlerTuple(ndivide=None, pad=0)}
    legend(figure, [*entries.values()], labels=[*entries], handler_map=side_by_side)


def _white(chunk: int, vpp: int) -> float:
    """Share of white in a chunk's colour: the first is the darkest; a single one is in between."""
    return 0.4 if vpp == 1 else LIGHTEST * chunk / (vpp - 1)


def _shade(kind: ActionKind, chunk: int, vpp: int) -> str:
    return mixed(LOOKS[kind][1], "white", _white(chunk, vpp))
