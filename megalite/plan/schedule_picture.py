"""Draws a timeline: a row for each pipeline rank, a box for each action, its microbatch inside where it fits.

Simulated and recorded times look alike.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from megalite.pipeline.actions import ActionKind
from megalite.plan.drawing import GREY, INK, legend, mixed, page
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
THIN = 0.02  # narrower boxes have no edges
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
    _boxes(axes, timeline, unit, wide / span if row > NAMED else 0, thin=wide < THIN * longest)
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


def _boxes(axes: "Axes", timeline: Timeline, unit: Unit, inches: float, *, thin: bool) -> None:
    """A box for each action, and its microbatch where `inches` to a unit of time leave room for it.

    Thin boxes are points of an image, each of which shows the action that goes on there.
    """
    edges: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.5}
    if thin:
        edges = {"edgecolors": "none", "antialiaseds": False, "rasterized": True}
    for rank, spans in enumerate(timeline.ranks):
        low = rank - BOX / 2
        axes.broken_barh([(0, timeline.makespan * unit.scale)], (low, BOX), facecolors=IDLE)
        times = [(start * unit.scale, (end - start) * unit.scale) for _, start, end in spans]
        colours = [_shade(action.kind, action.chunk, timeline.vpp) for action, _, _ in spans]
        axes.broken_barh(times, (low, BOX), facecolors=colours, **edges)
        for (action, start, end), (left, width) in zip(spans, times, strict=True):
            text = str(action.microbatch)
            if (end - start) * inches >= 0.066 * len(text) + 0.05:
                colour = INK if _white(action.chunk, timeline.vpp) > 0.3 else "white"
                axes.text(left + width / 2, rank, text, ha="center", va="center_baseline", size=7.5, color=colour)


def _legend(figure: "Figure", timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    kinds, vpp = {span.action.kind for spans in timeline.ranks for span in spans}, timeline.vpp
    chunks = f", chunks 0-{vpp - 1}" if vpp > 1 else ""  # from dark to light
    handles = [
        Patch(label=f"{words}{chunks}", facecolor=_shade(kind, 0, vpp))
        for kind, (words, _) in LOOKS.items()
        if kind in kinds
    ]
    legend(figure, [*handles, Patch(label="idle", facecolor=IDLE)])


def _white(chunk: int, vpp: int) -> float:
    """Share of white in a chunk's colour: the first is the darkest; a single one is in between."""
    return 0.4 if vpp == 1 else LIGHTEST * chunk / (vpp - 1)


@cache
def _shade(kind: ActionKind, chunk: int, vpp: int) -> str:
    return mixed(LOOKS[kind][1], "white", _white(chunk, vpp))
