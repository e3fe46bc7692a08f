"""Works out charts as plain records: lines over steps, shares over steps, columns by rank.

macros.html draws them as SVG, which needs no script. A chart of lines also carries its data, from which charts.js draws
it again when the reader zooms or smooths.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.observe import readable
from megalite.observe.curve import smoothed
from megalite.observe.report.axes import Axis, axis_of, limits, percent, short
from megalite.observe.run_data import Bucket

COLOURS = 10  # of report.css
MOST_COLUMNS = 160
MOST_DOTS = 60  # a line of more points has no dots
SMOOTH = 40  # a curve is averaged over one part in so many
LEFT, RIGHT, TOP, BOTTOM = 48.0, 12.0, 26.0, 24.0  # around the frame, as in charts.js


@dataclass(frozen=True)
class Line:
    """A line of a chart. `dots`: each of few values is marked; `smooth`: a mean is drawn over noisy values."""

    name: str
    points: Sequence[Bucket]
    colour: int
    dots: bool = False
    smooth: bool = False


@dataclass(frozen=True)
class Look:
    """The size of a chart and its axes; `words` writes its values in its title and at its columns."""

    words: Callable[[float], str] = readable.loss
    unit: str = ""  # of the values, above the axis
    from_zero: bool = False
    share: bool = False  # values are shares of 1
    area: bool = False  # lines fill the area between their low and high
    over: str = "step"
    width: float = 380.0
    height: float = 225.0

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def floor(self) -> float:
        return self.height - BOTTOM

    @property
    def inside(self) -> tuple[float, float, float, float]:
        """Where curves may be, with room for dots: left, top, width, height."""
        return LEFT - 4, TOP - 4, self.right - LEFT + 8, self.floor - TOP + 8

    def tick(self, value: float) -> str:
        return percent(value) if self.share else short(value)


class Column(NamedTuple):
    """One rank, or the greatest value of several; `marked` ones have another colour."""

    name: str
    value: str
    x: float
    y: float
    width: float
    marked: bool


@dataclass(frozen=True)
class Chart:
    """A picture in which everything has its place. `said`: its values in words, for a reader who cannot see it."""

    title: str
    said: str
    look: Look
    up: Sequence[tuple[float, str]]  # the height of each line of the grid, and its number
    across: Sequence[tuple[float, str]]
    lines: Sequence[Line] = ()  # for the legend
    shapes: Sequence[tuple[str, str]] = ()  # class and path
    dots: Sequence[tuple[float, float, int]] = ()  # x, y, colour
    columns: Sequence[Column] = ()
    peak: str = ""  # the greatest value, where it leaves the frame
    data: str = ""  # for charts.js


class Frame(NamedTuple):
    """Where values are drawn."""

    look: Look
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return LEFT + self.across.place(value) * (self.look.right - LEFT)

    def y(self, value: float) -> float:
        return self.look.floor - self.up.place(value) * (self.look.floor - TOP)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def grid(self) -> list[tuple[float, str]]:
        ticks = [tick for tick in self.up.ticks if -1e-9 <= self.up.place(tick) <= 1 + 1e-9]
        return [(self.y(tick), self.look.tick(tick)) for tick in ticks]


def line_chart(title: str, lines: Sequence[Line], look: Look) -> Chart | None:
    """Lines over steps. Lines without points are left out; None where no line has any."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    ends = [end for line in lines for end in limits([point.y for point in line.points])]
    across = axis_of([point.x for line in lines for point in line.points], ticks=4, counts=True)
    up = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0)) if look.area else axis_of(ends, from_zero=look.from_zero)
    frame, highest = Frame(look, across, up), max(point.high for line in lines for point in line.points)
    said = [
        f"{line.name} from {look.words(line.points[0].y)} at {look.over} {short(line.points[0].x)} "
        f"to {look.words(line.points[-1].y)} at {look.over} {short(line.points[-1].x)}"
        for line in lines
    ]
    return Chart(
        title,
        "; ".join(said),
        look,
        frame.grid(),
        [(frame.x(tick), short(tick)) for tick in across.ticks],
        lines,
        [shape for line in lines for shape in _shapes(frame, line)],
        [dot for line in lines for dot in _dots(frame, line)],
        peak=f"up to {look.tick(highest)}" if highest > up.high else "",
        data=_data(lines, look),
    )


def share_chart(title: str, parts: Mapping[str, Sequence[Bucket]]) -> Chart | None:
    """How a whole is divided, over steps: areas that lie on each other. Part i has the colour i."""
    stacked: list[list[Bucket]] = [[] for _ in parts]
    for buckets in zip(*parts.values(), strict=True):
        total, below = sum(bucket.y for bucket in buckets) or 1.0, 0.0
        for bucket, points in zip(buckets, stacked, strict=True):
            above = below + bucket.y / total
            points.append(Bucket(bucket.first, bucket.last, below, above, above))
            below = above
    lines = [Line(name, points, at) for at, (name, points) in enumerate(zip(parts, stacked, strict=True))]
    return line_chart(title, lines, Look(readable.percent, share=True, area=True, width=640.0, height=250.0))


def column_chart(title: str, values: Sequence[float], look: Look, marked: Iterable[int] = ()) -> Chart:
    """A column for each rank; of very many ranks, neighbours share a column."""
    every = -(-len(values) // MOST_COLUMNS)
    highest = [max(values[at : at + every]) for at in range(0, len(values), every)]
    frame = Frame(look, Axis(0.0, float(len(highest)), ()), axis_of(values, from_zero=True, ticks=4))
    room, noted = frame.x(1) - frame.x(0), {rank // every for rank in marked}
    width = min(room * (0.76 if len(highest) <= 64 else 1.0), 56.0)
    columns = []
    for at, value in enumerate(highest):
        name = f"rank {at}" if every == 1 else f"ranks {at * every} to {min(len(values), (at + 1) * every) - 1}"
        left = frame.x(at + 0.5) - width / 2
        columns.append(Column(name, look.words(value), left, frame.y(value), width, at in noted))
    across = [(frame.x(at + 0.5), str(at * every)) for at in range(0, len(highest), -(-len(highest) // 12))]
    said = f"{len(values)} ranks, from {look.words(min(values))} to {look.words(max(values))}"
    return Chart(title, said, look, frame.grid(), across, columns=columns)


def _shapes(frame: Frame, line: Line) -> list[tuple[str, str]]:
    """The band around a line, or its area; the line itself; its mean where it is noisy."""
    points, shapes = line.points, list[tuple[str, str]]()
    if frame.look.area or any(point.low < point.high for point in points):
        ends = [frame.across.low, frame.across.high]  # the shares of a single step fill the whole width
        wide = [(x, point) for point in points for x in (ends if len(points) == 1 else [point.x])]
        around = [*((x, point.high) for x, point in wide), *((x, point.low) for x, point in reversed(wide))]
        shapes.append((f"{'area' if frame.look.area else 'band'} c{line.colour}", f"{frame.path(around)}Z"))
    if frame.look.area or len(points) == 1:
        return shapes
    drawn = [(point.x, point.y) for point in points]
    if line.smooth and (window := len(points) // SMOOTH) > 1:
        shapes.append((f"faint c{line.colour}", frame.path(drawn)))
        means = smoothed([(at, y) for at, (_, y) in enumerate(drawn)], window=window)
        drawn = [(x, mean) for (x, _), (_, mean) in zip(drawn, means, strict=True)]
    return [*shapes, (f"curve c{line.colour}", frame.path(drawn))]


def _dots(frame: Frame, line: Line) -> list[tuple[float, float, int]]:
    count = len(line.points)
    if frame.look.area or not (count == 1 or (line.dots and count <= MOST_DOTS)):
        return []
    return [(frame.x(point.x), frame.y(point.y), line.colour) for point in line.points]


def _data(lines: Sequence[Line], look: Look) -> str:
    """What charts.js draws from: the same values, with six digits."""
    shown = []
    for line in lines:
        style = {"name": line.name, "colour": line.colour, "dots": line.dots, "smooth": line.smooth}
        points = [(it.x, it.y, it.low, it.high)[: 4 if look.area or it.low < it.high else 2] for it in line.points]
        shown.append({**style, "points": [[float(f"{value:.6g}") for value in point] for point in points]})
    axes = {"over": look.over, "unit": look.unit, "zero": look.from_zero, "area": look.area, "share": look.share}
    return json.dumps({**axes, "lines": shown}, separators=(",", ":"))
