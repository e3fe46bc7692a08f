"""Works out charts: lines over steps, shares over steps, columns by rank.

charts.js draws the lines, from data that a chart carries in an attribute. Where no script runs, plain curves with their
values in words are seen instead. macros.html draws the columns.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.observe import readable
from megalite.observe.run_data import Bucket

COLOURS = 10  # of report.css
MOST_COLUMNS = 160


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
    figure: Figure
    colour: int


class Column(NamedTuple):
    """One rank, or the greatest value of several from `first` on; `marked` ones have another colour."""

    name: str
    first: int
    value: float
    marked: bool


@dataclass(frozen=True)
class Chart:
    """Lines or columns. `description`: the values in words."""

    title: str
    description: str
    figure: Figure
    lines: Sequence[Line] = ()
    columns: Sequence[Column] = ()
    over: str = "step"
    area: bool = False  # lines fill the area between their low and high
    width: float = 380.0
    height: float = 225.0

    @property
    def data(self) -> str:
        """What charts.js draws from, with six digits."""
        shown = []
        for line in self.lines:
            style = {"name": line.name, "colour": line.colour, "dots": line.figure.dots, "smooth": line.figure.smooth}
            points = [(it.x, it.y, it.low, it.high)[: 4 if self.area or it.low < it.high else 2] for it in line.points]
            shown.append({**style, "points": [[float(f"{value:.6g}") for value in point] for point in points]})
        it = self.figure
        axes = {"over": self.over, "unit": it.unit, "zero": it.from_zero, "area": self.area, "share": it.share}
        return json.dumps({**axes, "lines": shown}, separators=(",", ":"))

    @property
    def plain_curves(self) -> list[tuple[int, str]]:
        """Colour and path of each line, in a square of 1 x 1."""
        points = [point for line in self.lines for point in line.points]
        (left, right), (low, high) = ((min(it), max(it)) for it in ([it.x for it in points], [it.y for it in points]))
        wide, tall = right - left or 1.0, high - low or 1.0
        return [
            (
                line.colour,
                "M" + "L".join(f"{(it.x - left) / wide:.3f} {(high - it.y) / tall:.3f}" for it in line.points),
            )
            for line in self.lines
        ]

    @property
    def top(self) -> float:
        """A round number that no column exceeds."""
        most = max([column.value for column in self.columns])
        if most <= 0:
            return 1.0
        power = 10.0 ** math.floor(math.log10(most))
        return next(factor * power for factor in (1, 2, 4, 6, 8, 10) if factor * power >= most)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    over: str = "step",
    area: bool = False,
    width: float = 380.0,
    height: float = 225.0,
) -> Chart | None:
    """Lines over steps. Lines without points are left out, the first of the others decides how the chart looks; None
    where no line has any."""

    def words(line: Line, point: Bucket) -> str:
        return f"{line.figure.words(point.y)} at {over} {readable.short(point.x)}"

    lines = [line for line in lines if line.points]
    description = "; ".join(f"{it.name} from {words(it, it.points[0])} to {words(it, it.points[-1])}" for it in lines)
    return Chart(title, description, lines[0].figure, lines, (), over, area, width, height) if lines else None


def share_chart(title: str, parts: Mapping[str, Sequence[Bucket]]) -> Chart | None:
    """How a whole is divided, over steps: areas that lie on each other. Part i has the colour i."""
    stacked: list[list[Bucket]] = [[] for _ in parts]
    for buckets in zip(*parts.values(), strict=True):
        total, below = sum(bucket.y for bucket in buckets) or 1.0, 0.0
        for bucket, points in zip(buckets, stacked, strict=True):
            above = below + bucket.y / total
            points.append(Bucket(bucket.first, bucket.last, below, above, above))
            below = above
    figure = Figure("", readable.percent, share=True)
    lines = [Line(name, points, figure, at) for at, (name, points) in enumerate(zip(parts, stacked, strict=True))]
    return line_chart(title, lines, area=True, width=640.0, height=250.0)


def column_chart(title: str, values: Sequence[float], figure: Figure, marked: Iterable[int] = ()) -> Chart:
    """A column for each rank; of very many ranks, neighbours share a column."""
    every, noted, columns = -(-len(values) // MOST_COLUMNS), {*marked}, []
    for first in range(0, len(values), every):
        its = range(first, min(first + every, len(values)))
        name = f"rank {first}" if every == 1 else f"ranks {first} to {its[-1]}"
        columns.append(Column(name, first, max(values[rank] for rank in its), not noted.isdisjoint(its)))
    description = f"{len(values)} ranks, from {figure.words(min(values))} to {figure.words(max(values))}"
    return Chart(title, description, figure, columns=columns)
