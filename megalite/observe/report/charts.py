"""Works out charts: lines over steps, shares over steps, columns by rank.

macros.html draws them as SVG, which needs no script. A chart of lines also carries its data, from which charts.js draws
it again when the reader zooms or smooths.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.observe import readable
from megalite.observe.curve import smoothed
from megalite.observe.run_data import Bucket

COLOURS = 10  # of report.css
MOST_COLUMNS = 160
MOST_DOTS = 60  # a line of more points has no dots
SMOOTH = 40  # a curve is averaged over one part in so many
LEFT, RIGHT, TOP, BOTTOM = 48.0, 12.0, 26.0, 24.0  # around the frame, as in charts.js
FEW = 20  # with fewer values than this, an axis shows all of them
NOTHING = 1e-250  # values closer than this are drawn as equal: their distance is too small to divide by


@dataclass(frozen=True)
class Figure:
    """How a figure of a run is drawn; `words` writes its values in a chart's title and at its columns."""

    title: str
    words: Callable[[float], str] = readable.loss
    unit: str = ""  # above the axis
    colour: int = 0
    from_zero: bool = False
    share: bool = False  # values are shares of 1
    dots: bool = False  # each of few values is marked
    smooth: bool = False  # a mean is drawn over noisy values


class Line(NamedTuple):
    """A line of a chart."""

    name: str
    points: Sequence[Bucket]
    colour: int
    dots: bool = False
    smooth: bool = False


class Column(NamedTuple):
    """One rank, or the greatest value of several from `first` on; `marked` ones have another colour."""

    name: str
    first: int
    value: float
    marked: bool


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to 0 to 1."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Chart:
    """A picture in which everything has its place. `description`: its values in words, for who cannot see it."""

    title: str
    description: str
    figure: Figure
    up: Axis
    across: Axis
    lines: Sequence[Line] = ()
    columns: Sequence[Column] = ()
    over: str = "step"
    area: bool = False  # lines fill the area between their low and high
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

    def x(self, value: float) -> float:
        return LEFT + self.across.place(value) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.floor - self.up.place(value) * (self.floor - TOP)

    def tick(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.figure.share else readable.short(value)

    @property
    def grid(self) -> list[tuple[float, str]]:
        """The height of each line of the grid, and its number."""
        ticks = [tick for tick in self.up.ticks if -1e-9 <= self.up.place(tick) <= 1 + 1e-9]
        return [(self.y(tick), self.tick(tick)) for tick in ticks]

    @property
    def numbers(self) -> list[tuple[float, str]]:
        """The place of each number below the frame, and the number."""
        if self.columns:
            every = -(-len(self.columns) // 12)
            return [(self.x(at + 0.5), str(it.first)) for at, it in enumerate(self.columns) if at % every == 0]
        return [(self.x(tick), readable.short(tick)) for tick in self.across.ticks]

    @property
    def peak(self) -> str:
        """The greatest value, where it leaves the frame."""
        highest = max((point.high for line in self.lines for point in line.points), default=self.up.high)
        return f"up to {self.tick(highest)}" if highest > self.up.high else ""

    @property
    def bars(self) -> list[tuple[Column, float, float, float]]:
        """Columns with left, top and width."""
        room = (self.right - LEFT) / max(1, len(self.columns))
        width = min(room * (0.76 if len(self.columns) <= 64 else 1.0), 56.0)
        return [(it, self.x(at + 0.5) - width / 2, self.y(it.value), width) for at, it in enumerate(self.columns)]

    @property
    def shapes(self) -> list[tuple[str, str]]:
        """Class and path: of each line the band around it, or its area; itself; its mean where it is noisy."""
        found = []
        for _, points, colour, _, smooth in self.lines:
            if self.area or any(point.low < point.high for point in points):
                ends = [self.across.low, self.across.high]  # the shares of a single step fill the whole width
                wide = [(x, point) for point in points for x in (ends if len(points) == 1 else [point.x])]
                around = [*((x, point.high) for x, point in wide), *((x, point.low) for x, point in reversed(wide))]
                found.append((f"{'area' if self.area else 'band'} c{colour}", f"{self._path(around)}Z"))
            if self.area or len(points) == 1:
                continue
            drawn = [(point.x, point.y) for point in points]
            if smooth and (window := len(points) // SMOOTH) > 1:
                found.append((f"faint c{colour}", self._path(drawn)))
                drawn = smoothed(drawn, window=window)
            found.append((f"curve c{colour}", self._path(drawn)))
        return found

    @property
    def dots(self) -> list[tuple[float, float, int]]:
        """x, y, colour."""
        marked = [it for it in self.lines if len(it.points) == 1 or (it.dots and len(it.points) <= MOST_DOTS)]
        lines = [] if self.area else marked
        return [(self.x(point.x), self.y(point.y), line.colour) for line in lines for point in line.points]

    @property
    def data(self) -> str:
        """What charts.js draws from: the same values, with six digits. Empty for columns."""
        shown = []
        for line in self.lines:
            style = {"name": line.name, "colour": line.colour, "dots": line.dots, "smooth": line.smooth}
            points = [(it.x, it.y, it.low, it.high)[: 4 if self.area or it.low < it.high else 2] for it in line.points]
            shown.append({**style, "points": [[float(f"{value:.6g}") for value in point] for point in points]})
        it = self.figure
        axes = {"over": self.over, "unit": it.unit, "zero": it.from_zero, "area": self.area, "share": it.share}
        return json.dumps({**axes, "lines": shown}, separators=(",", ":")) if shown else ""

    def _path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)


def line_chart(
    title: str,
    lines: Sequence[Line],
    figure: Figure,
    *,
    over: str = "step",
    area: bool = False,
    width: float = 380.0,
    height: float = 225.0,
) -> Chart | None:
    """Lines over steps. Lines without points are left out; None where no line has any."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    ends = [end for line in lines for end in limits([point.y for point in line.points])]
    across = axis_of([point.x for line in lines for point in line.points], ticks=4, counts=True)
    up = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0)) if area else axis_of(ends, from_zero=figure.from_zero)

    def words(point: Bucket) -> str:
        return f"{figure.words(point.y)} at {over} {readable.short(point.x)}"

    description = "; ".join(f"{it.name} from {words(it.points[0])} to {words(it.points[-1])}" for it in lines)
    return Chart(title, description, figure, up, across, lines, (), over, area, width, height)


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
    return line_chart(title, lines, Figure("", readable.percent, share=True), area=True, width=640.0, height=250.0)


def column_chart(title: str, values: Sequence[float], figure: Figure, marked: Iterable[int] = ()) -> Chart:
    """A column for each rank; of very many ranks, neighbours share a column."""
    every, noted, columns = -(-len(values) // MOST_COLUMNS), {*marked}, []
    for first in range(0, len(values), every):
        its = range(first, min(first + every, len(values)))
        name = f"rank {first}" if every == 1 else f"ranks {first} to {its[-1]}"
        columns.append(Column(name, first, max(values[rank] for rank in its), not noted.isdisjoint(its)))
    description = f"{len(values)} ranks, from {figure.words(min(values))} to {figure.words(max(values))}"
    up, across = axis_of(values, from_zero=True, ticks=4), Axis(0.0, float(len(columns)), ())
    return Chart(title, description, figure, up, across, columns=columns)


def axis_of(values: Sequence[float], *, ticks: int = 5, from_zero: bool = False, counts: bool = False) -> Axis:
    """An axis that holds all (finite) values, with round numbers along it.

    With `counts`, values are steps or tokens and the axis ends with them.
    """
    low, high = min(values), max(values)
    if from_zero:
        low = min(low, 0.0)
    if high - low < NOTHING:
        room = abs(low) / 2 if abs(low) >= NOTHING else 1.0
        low, high = (low, high + room) if from_zero and low == 0 else (low - room, high + room)
    least = (high - low) / ticks
    power = 10.0 ** math.floor(math.log10(least))
    factors = (1, 2, 5, 10) if counts else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= least * (1 - 1e-9))
    if counts:
        step = max(1.0, step)
    else:
        room = 0.04 * (high - low)
        low, high = low if from_zero and low == 0 else low - room, high + room
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(at * step for at in range(first, last + 1)))


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The range that an axis should show: the middle nine tenths of the values, and values not far from them.

    A few first steps or a spike then leave the chart instead of flattening the rest.
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    low, high = ordered[int(0.05 * last)], ordered[int(0.95 * last)]
    if len(ordered) < FEW or low == high:
        return ordered[0], ordered[-1]
    room = (high - low) / 2
    return max(ordered[0], low - room), min(ordered[-1], high + room)
