"""Charts as inline SVG, drawn by hand: lines over steps, shares over steps, columns by rank.

A chart needs no script and no network. Its colours are variables of the page (style.py), so it follows light and dark;
a pointer or a finger on it shows the values there, by style alone. Its title says the same to who cannot see it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from megalite.train import readable
from megalite.train.curve import smoothed
from megalite.train.report.axes import Axis, Words, axis_of, labels, short
from megalite.train.report.markup import Markup, joined, number, tag
from megalite.train.report.series import Series

COLOURS = 10  # of the page
MOST_TIPS = 48  # places of a chart that show their values
MOST_COLUMNS = 160
LETTER, ROW = 6.6, 16.0  # a letter's width, and a row's height, of the text in a tip
SMOOTH = 40  # of so many parts of a curve one is averaged over


class Point(NamedTuple):
    """A value at a place, and the least and greatest of those that it stands for."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """What a line shows. `dots`: few values, each marked; `smooth`: noisy ones, whose mean is drawn over them."""

    name: str
    points: Sequence[Point]
    colour: int
    words: Words
    dots: bool = False
    smooth: bool = False


@dataclass(frozen=True)
class Look:
    """How large a chart is, and what its axes are like."""

    width: float = 380.0
    height: float = 225.0
    unit: str = ""  # of the values, above the axis
    from_zero: bool = False
    steep: bool = False  # may be logarithmic
    tick: Words = short
    over: str = "step"


@dataclass(frozen=True)
class Frame:
    """Where values are drawn."""

    look: Look
    across: Axis
    up: Axis
    left: float = 48.0
    right: float = 12.0
    top: float = 26.0
    bottom: float = 24.0

    def x(self, value: float) -> float:
        return self.left + self.across.place(value) * (self.look.width - self.left - self.right)

    def y(self, value: float) -> float:
        return self.floor - self.up.place(value) * (self.floor - self.top)

    @property
    def floor(self) -> float:
        return self.look.height - self.bottom


def points_of(series: Series, scale: float = 1.0) -> list[Point]:
    """A series as points; `scale`: what a step counts on the axis (tokens per step)."""
    return [Point(bucket.at * scale, bucket.mean, bucket.low, bucket.high) for bucket in series]


def line_chart(lines: Sequence[Line], title: str, look: Look = Look()) -> Markup:
    """Lines over steps. Lines without points are left out; without any there is no chart but a word."""
    lines = [line for line in lines if line.points]
    if not lines:
        return tag("p", "nothing yet", class_="quiet")
    everything = [value for line in lines for point in line.points for value in (point.low, point.high)]
    across = axis_of([point.x for line in lines for point in line.points], ticks=4, counts=True)
    frame = Frame(look, across, axis_of(everything, from_zero=look.from_zero, steep=look.steep))
    drawn = [*_grid(frame), *(part for line in lines for part in _line(frame, line)), *_tips(frame, lines)]
    return _picture(frame, title, _in_words(lines, look), drawn)


def share_chart(parts: Sequence[tuple[str, Sequence[float]]], steps: Sequence[float], title: str, look: Look) -> Markup:
    """How a whole is divided, over steps: areas that lie on each other. Part i has the colour i."""
    if not steps:
        return tag("p", "nothing yet", class_="quiet")
    frame = Frame(look, axis_of(steps, ticks=4, counts=True), Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0)))
    totals = [sum(values) or 1.0 for values in zip(*(values for _, values in parts), strict=True)]
    below, areas, lines = [0.0] * len(steps), list[Markup](), list[Line]()
    for colour, (name, values) in enumerate(parts):
        shares = [value / total for value, total in zip(values, totals, strict=True)]
        above = [low + share for low, share in zip(below, shares, strict=True)]
        outline = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        if len(steps) == 1:
            outline = [(frame.across.low, above[0]), (frame.across.high, above[0])]
            outline += [(frame.across.high, below[0]), (frame.across.low, below[0])]
        areas.append(tag("path", d=_path(frame, outline) + "Z", class_=f"area f{colour}"))
        points = [Point(step, share, share, share) for step, share in zip(steps, shares, strict=True)]
        lines.append(Line(name, points, colour, readable.percent))
        below = above
    drawn = [*areas, *_grid(frame), *_tips(frame, lines)]
    return _picture(frame, title, _in_words(lines, look), drawn)


def for_any_width(draw: Callable[[Look], Markup], look: Look, width: float, height: float) -> Markup:
    """A chart so wide on a wide screen, and as others are on a phone, where its text would be too small to read."""
    broad, narrow = draw(replace(look, width=width, height=height)), draw(look)
    return joined([tag("div", broad, class_="broad"), tag("div", narrow, class_="narrow")])


def column_chart(values: Sequence[float], title: str, words: Words, look: Look, marked: Iterable[int] = ()) -> Markup:
    """A column for each rank, `marked` ones in another colour; of very many ranks the greatest of some neighbours."""
    every = -(-len(values) // MOST_COLUMNS)
    highest = [max(values[at : at + every]) for at in range(0, len(values), every)]
    frame = Frame(look, Axis(0.0, float(len(highest)), ()), axis_of(values, from_zero=True, ticks=4))
    columns = []
    noted = {rank // every for rank in marked}
    for at, value in enumerate(highest):
        gap = 0.12 if len(highest) <= 64 else 0.0
        left, right = frame.x(at + gap), frame.x(at + 1 - gap)
        name = f"rank {at}" if every == 1 else f"ranks {at * every} to {min(len(values), (at + 1) * every) - 1}"
        width = min(right - left, 56.0)
        column = tag(
            "rect",
            tag("title", f"{name}: {words(value)}"),
            x=(left + right - width) / 2,
            y=frame.y(value),
            width=width,
            height=frame.floor - frame.y(value),
            class_="f3" if at in noted else "f0",
        )
        columns.append(column)
        if len(highest) <= 8:
            columns.append(tag("text", words(value), x=(left + right) / 2, y=frame.y(value) - 4, class_="mid strong"))
    labels = [at for at in range(len(highest)) if at % -(-len(highest) // 12) == 0]
    names = [tag("text", str(at * every), x=frame.x(at + 0.5), y=frame.floor + 15, class_="mid") for at in labels]
    said = f"{len(values)} ranks, from {words(min(values))} to {words(max(values))}"
    return _picture(frame, title, said, [*_grid(frame), *columns, *names])


def legend(entries: Iterable[tuple[str, int, str]]) -> Markup:
    """What the colours of a chart mean: (name, colour, what else there is to say)."""
    items = [
        tag("li", tag("i", class_=f"b{colour}"), tag("span", name), *([tag("b", said)] if said else []))
        for name, colour, said in entries
    ]
    return tag("ul", *items, class_="legend")


def _picture(frame: Frame, title: str, said: str, drawn: Sequence[str]) -> Markup:
    look = frame.look
    unit = tag("text", look.unit, x=4.0, y=12.0, class_="unit") if look.unit else Markup()
    return tag(
        "svg",
        tag("title", f"{title}: {said}"),
        unit,
        *drawn,
        viewBox=f"0 0 {number(look.width)} {number(look.height)}",
        role="img",
        class_="chart",
    )


def _in_words(lines: Sequence[Line], look: Look) -> str:
    """For who cannot see the chart."""
    said = []
    for line in lines:
        first, last = line.points[0], line.points[-1]
        said.append(
            f"{line.name} from {line.words(first.y)} at {look.over} {short(first.x)} to {line.words(last.y)} at "
            f"{look.over} {short(last.x)}"
        )
    return "; ".join(said)


def _grid(frame: Frame) -> list[Markup]:
    """Lines at round values, numbers beside and below."""
    look, parts = frame.look, []
    edge = look.width - frame.right
    for tick, label in zip(frame.up.ticks, labels(frame.up.ticks, look.tick), strict=True):
        if -1e-9 <= frame.up.place(tick) <= 1 + 1e-9:
            y = frame.y(tick)
            parts.append(tag("path", d=f"M{number(frame.left)} {number(y)}H{number(edge)}", class_="grid"))
            parts.append(tag("text", label, x=frame.left - 6, y=y + 4, class_="end"))
    for tick in frame.across.ticks:
        x = frame.x(tick)
        where = "end" if x > edge - 14 else "mid"
        parts.append(tag("text", short(tick), x=x, y=frame.floor + 16, class_=where))
    parts.append(tag("path", d=f"M{number(frame.left)} {number(frame.floor)}H{number(edge)}", class_="floor"))
    return parts


def _line(frame: Frame, line: Line) -> list[Markup]:
    points, parts = line.points, []
    if any(point.low < point.high for point in points):
        around = [*((p.x, p.high) for p in points), *((p.x, p.low) for p in reversed(points))]
        parts.append(tag("path", d=_path(frame, around) + "Z", class_=f"band f{line.colour}"))
    window = max(1, len(points) // SMOOTH) if line.smooth else 1
    drawn = [(point.x, point.y) for point in points]
    if window > 1:
        parts.append(tag("path", d=_path(frame, drawn), class_=f"faint s{line.colour}"))
        drawn = _smoothed(drawn, window)
    if len(points) > 1:
        parts.append(tag("path", d=_path(frame, drawn), class_=f"curve s{line.colour}"))
    if (line.dots and len(points) <= 60) or len(points) == 1:
        parts += [tag("circle", cx=frame.x(x), cy=frame.y(y), r=3.0, class_=f"dot f{line.colour}") for x, y in drawn]
    return parts


def _smoothed(points: list[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """The same places, each with the mean of its neighbours."""
    means = smoothed([(at, y) for at, (_, y) in enumerate(points)], window=window)
    return [(x, mean) for (x, _), (_, mean) in zip(points, means, strict=True)]


def _path(frame: Frame, points: Iterable[tuple[float, float]]) -> str:
    """A path has hundreds of points: their places are worked out here, without a call for each."""
    across, up = frame.across, frame.up
    left, wide = frame.left, (frame.look.width - frame.left - frame.right) / (across.high - across.low)
    if up.logarithmic:
        return "M" + "L".join(f"{left + (x - across.low) * wide:.1f} {frame.y(y):.1f}" for x, y in points)
    floor, high = frame.floor, (frame.floor - frame.top) / (up.high - up.low)
    return "M" + "L".join(f"{left + (x - across.low) * wide:.1f} {floor - (y - up.low) * high:.1f}" for x, y in points)


def _tips(frame: Frame, lines: Sequence[Line]) -> list[Markup]:
    """What is shown where a pointer is: a stripe for each of some places, with its values in a box."""
    places = sorted({point.x for line in lines for point in line.points})
    if len(places) > MOST_TIPS:
        places = [places[round(at * (len(places) - 1) / (MOST_TIPS - 1))] for at in range(MOST_TIPS)]
    edges = [frame.left, *((frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(places))]
    edges.append(frame.look.width - frame.right)
    xs = {line.name: [point.x for point in line.points] for line in lines}
    tips = []
    for place, (start, end) in zip(places, pairwise(edges), strict=True):
        where = short(place) if place >= 1e6 else f"{place:,.0f}"
        rows: list[tuple[str, int | None]] = [(f"{frame.look.over} {where}", None)]
        for line in lines:
            at = bisect_right(xs[line.name], place) - 1
            if at >= 0:
                rows.append((f"{line.name} {line.words(line.points[at].y)}", line.colour))
        stripe = tag("rect", x=start, y=frame.top, width=end - start, height=frame.floor - frame.top, class_="stripe")
        tips.append(tag("g", stripe, *_box(frame, frame.x(place), rows), class_="tip"))
    return tips


def _box(frame: Frame, x: float, rows: Sequence[tuple[str, int | None]]) -> list[Markup]:
    """A vertical line at `x`, and the rows in a box beside it."""
    width = 16 + LETTER * max(len(text) for text, _ in rows)
    left = x + 8 if x + 8 + width < frame.look.width else max(2.0, x - 8 - width)
    parts = [
        tag("path", d=f"M{number(x)} {number(frame.top)}V{number(frame.floor)}", class_="cross"),
        tag("rect", x=left, y=frame.top + 2, width=width, height=ROW * len(rows) + 8, rx=4, class_="box"),
    ]
    for row, (text, colour) in enumerate(rows):
        style = "strong" if colour is None else f"t{colour}"
        parts.append(tag("text", text, x=left + 8, y=frame.top + 2 + ROW * (row + 1), class_=style))
    return parts
