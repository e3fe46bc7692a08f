"""Draws a timeline: a row for each pipeline rank, a box for each action, its microbatch inside where it fits.

Simulated and recorded times look alike. Equal timelines give equal files. All lengths are inches; matplotlib is
imported when a picture is asked for, without pyplot: nothing global changes.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.problems import Problem, UserError
from megalite.parallel.picture import GREY, INK
from megalite.pipeline.actions import Kind
from megalite.pipeline.timeline import Timeline, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORDS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward-input": "backward: gradients of activations",
    "backward-weight": "backward: gradients of weights",
}
COLOURS: dict[Kind, str] = {
    "forward": "#2f6fb5",
    "backward": "#2a9a58",
    "backward-input": "#2a9a58",
    "backward-weight": "#e38a2d",
}
IDLE, LINE = "#eef0f3", "#ffffff"
MARGIN, HEADER, FOOTER = 0.28, 0.88, 0.82  # around everything; above the rows; below them, for the axis and the legend
LEFT, RIGHT = 0.62, 1.3  # beside the rows: the names of ranks, and what they hold
NARROWEST, WIDEST = 7.0, 15.0  # of the rows
MICROBATCH = 1.05  # width of one microbatch's boxes, forward and backward, where there is room
ROW, HIGHEST = (0.30, 0.36), 9.0  # a box and its row, where all rows together stay below the highest
LOWEST_NAMED = 0.13  # rows lower than this are named one in eight
DIGIT, ROOM = 0.066, 0.05  # a digit of a microbatch's number, and what must be free around it
THIN, OUTLINED = 0.02, 0.05  # boxes narrower than this become an image; wider than that, they are outlined
POINTS, ROW_POINTS = 150, 6  # of a picture to the inch; of a row in such an image, the last one left white
LIGHTEST = 0.72  # share of white in the last of several chunks


def save_timeline(timeline: Timeline, path: Path, unit: Unit, *, title: str, setting: str = "picture") -> None:
    """Draw to a .png or .svg file, which appears only when it is complete."""
    from matplotlib import style

    draft = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else {}
    try:
        with style.context(["default", {"svg.hashsalt": "megalite", "svg.fonttype": "none"}]):
            figure_of(timeline, unit, title).savefig(draft, format=kind, dpi=POINTS, metadata=metadata)
        draft.replace(path)
    except OSError as error:
        raise UserError(Problem(setting, str(path), f"cannot be written: {error}", "another file")) from error
    finally:
        draft.unlink(missing_ok=True)


def figure_of(timeline: Timeline, unit: Unit, title: str) -> "Figure":
    """The whole picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    sheet = _Sheet(timeline)
    width, height = sheet.size
    figure = Figure(figsize=sheet.size)
    bottom = MARGIN + FOOTER
    rows = figure.add_axes(((MARGIN + LEFT) / width, bottom / height, sheet.wide / width, sheet.high / height))
    _rows(rows, sheet, unit.scale)
    rows.set_xlabel(f"time, in {unit.words}", size=8.5, color=GREY)
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    page.set_axis_off()
    page.patch.set_visible(False)
    top = height - MARGIN
    page.text(MARGIN, top, title, va="top", size=13, weight="bold", color=INK)
    page.text(MARGIN, top - 0.27, timeline.summary(unit), va="top", size=9.5, color=GREY)
    _names(page, sheet, bottom)
    _legend(page, timeline)
    return figure


@dataclass(frozen=True)
class _Sheet:
    """Where things stand, for one timeline."""

    timeline: Timeline

    @cached_property
    def wide(self) -> float:
        """Of the rows together. Where there is room, all schedules of one model and batch have one scale."""
        timeline = self.timeline
        work = timeline.computing / (timeline.pp * max(timeline.microbatches, 1))
        return min(max(MICROBATCH * timeline.makespan / work if work else 0, NARROWEST), WIDEST)

    @property
    def row(self) -> float:
        """From the top of a row to the top of the next."""
        return min(ROW[1], HIGHEST / self.timeline.pp)

    @property
    def box(self) -> float:
        return self.row * ROW[0] / ROW[1] if self.row > LOWEST_NAMED else self.row

    @property
    def high(self) -> float:
        return self.row * self.timeline.pp

    @property
    def size(self) -> tuple[float, float]:
        return 2 * MARGIN + LEFT + self.wide + RIGHT, 2 * MARGIN + HEADER + self.high + FOOTER

    @property
    def inch(self) -> float:
        """Inches to a unit of time."""
        return self.wide / (self.timeline.makespan or 1)

    def top(self, rank: int) -> float:
        """Of a rank's boxes, from the top of the rows."""
        return rank * self.row + (self.row - self.box) / 2


def _rows(axes: "Axes", sheet: _Sheet, scale: float) -> None:
    """All boxes at once, as there may be very many, and their microbatches where they can be read."""
    longest = max((len(spans) for spans in sheet.timeline.ranks), default=0)
    width = sheet.wide / max(longest, 1)
    if width < THIN:
        _image(axes, sheet, scale)
    else:
        _boxes(axes, sheet, scale, outlined=width > OUTLINED)
    for x, y, text, colour in _numbers(sheet):
        axes.text(x * scale, y, text, ha="center", va="center_baseline", size=7.5, color=colour, zorder=3)
    axes.set(xlim=(0, (sheet.timeline.makespan or 1) * scale), ylim=(sheet.high, 0), yticks=[])
    axes.tick_params(labelsize=8, colors=GREY, length=3)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.spines["bottom"].set_position(("outward", 3))


def _boxes(axes: "Axes", sheet: _Sheet, scale: float, *, outlined: bool) -> None:
    """A shape for each action."""
    from matplotlib.collections import PolyCollection

    timeline = sheet.timeline
    corners, colours = [], []
    for rank, spans in enumerate(timeline.ranks):
        high, low = sheet.top(rank), sheet.top(rank) + sheet.box
        times = [(0.0, timeline.makespan, IDLE)]
        times += [
            (start - timeline.begin, end - timeline.begin, _shade(action.kind, action.chunk, timeline.vpp))
            for action, start, end in spans
        ]
        for start, end, colour in times:
            left, right = start * scale, end * scale
            corners.append([(left, high), (right, high), (right, low), (left, low)])
            colours.append(colour)
    line: dict[str, Any] = {"edgecolors": LINE, "linewidths": 0.5} if outlined else {"linewidths": 0}
    axes.add_collection(PolyCollection(corners, facecolors=colours, antialiaseds=outlined, **line))


def _image(axes: "Axes", sheet: _Sheet, scale: float) -> None:
    """Of actions that are narrower than a few points of the picture, each point shows the mean colour."""
    import numpy as np

    timeline = sheet.timeline
    edges = np.linspace(timeline.begin, timeline.end, round(sheet.wide * POINTS) + 1)
    image = np.ones((timeline.pp, ROW_POINTS, len(edges) - 1, 3))
    filled = ROW_POINTS if sheet.box == sheet.row else ROW_POINTS - 1
    for rank, spans in enumerate(timeline.ranks):
        kinds: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
        for action, start, end in spans:
            kinds.setdefault((action.kind, action.chunk), []).append((start, end))
        image[rank, :filled] = _rgb(IDLE)
        for (kind, chunk), times in kinds.items():
            covered = np.repeat(np.cumsum([0.0, *(end - start for start, end in times)]), 2)[1:-1]
            share = np.diff(np.interp(edges, np.ravel(times), covered)) / np.diff(edges)
            colour = np.array(_rgb(_shade(kind, chunk, timeline.vpp))) - _rgb(IDLE)
            image[rank, :filled] += share[:, None] * colour
    axes.imshow(
        image.reshape(-1, *image.shape[2:]).clip(0, 1),
        extent=(0, timeline.makespan * scale, sheet.high, 0),
        aspect="auto",
        interpolation="nearest",
    )


def _numbers(sheet: _Sheet) -> Iterator[tuple[float, float, str, str]]:
    """Centre, text and colour of the microbatches' numbers where a box has room for them."""
    timeline = sheet.timeline
    if sheet.box < 0.16:
        return
    for rank, spans in enumerate(timeline.ranks):
        y = sheet.top(rank) + sheet.box / 2
        for action, start, end in spans:
            text = str(action.microbatch)
            if (end - start) * sheet.inch >= DIGIT * len(text) + ROOM:
                light = _white(action.chunk, timeline.vpp) > 0.3
                yield (start + end) / 2 - timeline.begin, y, text, INK if light else LINE


def _names(page: "Axes", sheet: _Sheet, bottom: float) -> None:
    """Ranks on the left, on the right what each holds at most."""
    timeline = sheet.timeline
    right = MARGIN + LEFT + sheet.wide + 0.14
    head = bottom + sheet.high + 0.1
    page.text(right, head, "holds at most the\nactivations of", va="bottom", size=8, color=GREY, linespacing=1.1)
    every = 1 if sheet.row >= LOWEST_NAMED else 8
    size = 9 if sheet.row > 0.2 else 7
    for rank in range(0, timeline.pp, every):
        y = bottom + sheet.high - sheet.top(rank) - sheet.box / 2
        page.text(MARGIN + LEFT - 0.1, y, f"rank {rank}", ha="right", va="center", size=size, color=INK)
        page.text(right, y, timeline.held(rank), va="center", size=size, color=INK)


def _legend(page: "Axes", timeline: Timeline) -> None:
    from matplotlib.patches import Rectangle

    there = {span.action.kind for span in chain.from_iterable(timeline.ranks)}
    left, y, side = MARGIN + LEFT, MARGIN + 0.02, 0.15
    entries = [
        ([_shade(kind, c, timeline.vpp) for c in range(timeline.vpp)], WORDS[kind]) for kind in COLOURS if kind in there
    ]
    for shades, words in [*entries, ([IDLE], "idle")]:
        for shade in shades:
            page.add_patch(Rectangle((left, y), side, side, facecolor=shade, linewidth=0))
            left += side
        chunks = f", chunks 0-{timeline.vpp - 1}" if len(shades) > 1 else ""
        page.text(left + 0.07, y + side / 2, f"{words}{chunks}", va="center_baseline", size=9, color=INK)
        left += 0.3 + 0.067 * len(f"{words}{chunks}")


def _white(chunk: int, vpp: int) -> float:
    """Share of white in a chunk's colour: the first is the darkest; a single one is in between."""
    return 0.4 if vpp == 1 else LIGHTEST * chunk / (vpp - 1)


def _shade(kind: Kind, chunk: int, vpp: int) -> str:
    white = _white(chunk, vpp)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _rgb(COLOURS[kind], 255))


def _rgb(colour: str, most: int = 1) -> list[float]:
    """Red, green and blue of `#rrggbb`, each up to `most`."""
    return [int(colour[at : at + 2], 16) * most / 255 for at in (1, 3, 5)]
