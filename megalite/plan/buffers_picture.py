"""Draws the buffers of one rank as tapes, to scale: buckets in the order in which backward completes them, the
parameters in each, and below them the slices of the ranks that own them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megalite.layout.buffer_layout import Bucket
from megalite.optim.rank_buffers import RankBuffers
from megalite.plan.buffers_table import bucket_name, padding_of
from megalite.plan.drawing import COLOURS, EDGE, FILL, GREY, INK, fitting, legend, mixed, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = dict(zip(("embedding", "attention", "mlp", "norm", "head"), COLOURS, strict=False))
OTHER = COLOURS[9]
LINE, GAP, THIN = 10.0, 0.09, 0.03  # a full line; between buckets; the least that is drawn of a bucket or slice
LINES = 12  # that a model takes where its buckets are small
BLOCK, BAR, STRIP, PITCH = 0.15, 0.34, 0.17, 1.05  # heights: a block's name, parameters, owners; of all
PADDING: dict[str, Any] = {"facecolor": "none", "edgecolor": EDGE, "hatch": "////", "lw": 0}
NOTE = (
    "Backward completes the gradients from left to right. A rank keeps masters and moments of what it owns. "
    "Widths are to scale, down to what can be seen."
)


@dataclass(frozen=True)
class Place:
    """Where bucket `number` is drawn: on line `line`, `width` inches from `left`."""

    number: int
    line: int
    left: float
    width: float


def places_of(sizes: Sequence[int]) -> list[Place]:
    """Buckets of these sizes one after the other, all to one scale, but none too thin to be seen."""
    scale = LINE / max(*sizes, -(-sum(sizes) // LINES), 1)
    places: list[Place] = []
    line, left = 0, 0.0
    for number, size in enumerate(sizes):
        width = max(size * scale, THIN)
        if left > 0 and left + width > LINE + 1e-9:
            line, left = line + 1, 0.0
        places.append(Place(number, line, left, width))
        left += width + GAP
    return places


def kind_of(name: str) -> str:
    """The colour's name for a parameter: the last part of its name that has a colour, else `other`."""
    parts = ["norm" if part.endswith("norm") else part for part in name.split(".")]
    return next((part for part in reversed(parts) if part in KINDS), "other")


def figure_of(buffers: RankBuffers, texts: Sequence[str]) -> "Figure":
    """The whole picture as a matplotlib figure; `texts` are a title and lines below it."""
    buckets = buffers.layout.buckets
    places = places_of([bucket.stop - bucket.start for bucket in buckets])
    lines = 1 + places[-1].line
    figure, axes = page(texts, LINE + 0.02, lines * PITCH)
    for bucket, place in zip(buckets, places, strict=True):
        tape = _Tape(axes, bucket, place, (lines - place.line) * PITCH)
        tape.draw_parameters()
        tape.draw_owners(buffers.owners[bucket.buffer.kind], buffers.rank)
    _legend(figure, buffers)
    return figure


@dataclass(frozen=True)
class _Tape:
    """One bucket, whose name begins at height `top`: its parameters, and below them the slices of their owners."""

    axes: "Axes"
    bucket: Bucket
    place: Place
    top: float

    @property
    def bar(self) -> float:
        """The height at which the parameters stand."""
        return self.top - 0.19 - BLOCK - BAR

    def draw_parameters(self) -> None:
        from matplotlib.ticker import EngFormatter

        bucket, place = self.bucket, self.place
        number, amount = bucket_name(place.number, bucket), EngFormatter(places=1)(bucket.stop - bucket.start)
        text = fitting(place.width + GAP / 2, 8.5, f"bucket {number}: {amount}", f"bucket {number}", number)
        self.axes.text(place.left, self.top, text, va="top", size=8.5, weight="bold", color=INK)
        self.box(bucket.start, bucket.stop, self.bar, BAR, **PADDING)  # seen where no parameter covers it
        for slot in bucket.slots:
            text, look = _short_name(slot.record.name), _look(kind_of(slot.record.name))
            self.box(slot.start, slot.stop, self.bar, BAR, text, size=8, lw=0.7, **look)
        y = self.bar + BAR + 0.03
        for block, run in groupby(bucket.slots, key=lambda slot: slot.record.place):
            if isinstance(block, int):  # a line over its parameters, with its number
                slots = [*run]
                left, right = self.x(slots[0].start), self.x(slots[-1].stop)
                self.axes.plot([left + 0.015, right - 0.015], [y, y], color=GREY, lw=1.2, solid_capstyle="butt")
                text = fitting(right - left, 7, f"block {block}", f"{block}")
                self.axes.text((left + right) / 2, y + 0.015, text, ha="center", va="bottom", size=7, color=GREY)

    def draw_owners(self, owners: Sequence[int], rank: int) -> None:
        """A strip of slices; of very thin ones only those that the rank owns."""
        low, width, most = self.bar - STRIP - 0.02, self.place.width / len(owners), max(owners)
        text = fitting(width, 7, f"rank {most}", f"{most}").replace(f"{most}", "{}")
        self.box(self.bucket.start, self.bucket.stop, low, STRIP, facecolor=FILL, edgecolor=EDGE, lw=0.5)
        for index, owner in enumerate(owners):
            own, fill = self.bucket.slice_of(index), INK if owner == rank else FILL
            if width >= THIN or owner == rank:
                self.box(own.start, own.stop, low, STRIP, text.format(owner), facecolor=fill, edgecolor=EDGE, lw=0.5)

    def x(self, at: int) -> float:
        """Where an element of the buffer is drawn."""
        share = (at - self.bucket.start) / max(1, self.bucket.stop - self.bucket.start)
        return self.place.left + share * self.place.width

    def box(self, start: int, stop: int, low: float, high: float, text: str = "", size: float = 7, **look: Any) -> None:
        """A rectangle, with a text where it fits."""
        left, width = self.x(start), self.x(stop) - self.x(start)
        self.axes.barh(low, width, high, left, align="edge", **look)
        if fitting(width, size, text):
            ink, middle = "white" if look["facecolor"] == INK else INK, (left + width / 2, low + high / 2)
            self.axes.text(*middle, text, ha="center", va="center", size=size, color=ink)


def _short_name(name: str) -> str:
    """`gate_up` for blocks.3.mlp.gate_up.weight, `embedding.word` for embedding.word.weight."""
    parts = name.removesuffix(".weight").split(".")
    return ".".join(parts[3:] if parts[0] == "blocks" and len(parts) > 3 else parts)


def _look(kind: str) -> dict[str, Any]:
    colour = KINDS.get(kind, OTHER)
    return {"facecolor": mixed(colour, "white", 0.68), "edgecolor": colour}


def _legend(figure: "Figure", buffers: RankBuffers) -> None:
    from matplotlib.patches import Patch

    kinds = {kind_of(slot.record.name) for slot in buffers.layout.slots}
    handles = [Patch(label=kind, **_look(kind)) for kind in (*KINDS, "other") if kind in kinds]
    if 100 * padding_of(*buffers.layout.buckets) > sum(buffers.layout.sizes.values()):
        handles.append(Patch(label="padding", **PADDING))
    legend(figure, [*handles, Patch(label=f"owned by rank {buffers.rank}", facecolor=INK)], NOTE)
