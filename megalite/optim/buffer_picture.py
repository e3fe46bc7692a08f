"""Draws the buffers of one rank as tapes, to scale: buckets in the order in which backward completes them, the
parameters in each, and below them the slices of the ranks that own them.

Equal buffers give equal files (no time stamps, no settings of the user). All lengths are inches. matplotlib is imported
when a picture is asked for, without pyplot: nothing global changes.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.problems import Problem, UserError
from megalite.optim.buffer_layout import Bucket, BufferSlot
from megalite.optim.buffer_table import bucket_name, padding_of
from megalite.optim.rank_buffers import RankBuffers
from megalite.parallel.picture import COLOURS, GREY, INK, MARGIN, NODE_EDGE, NODE_FILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"embedding": COLOURS[0], "attention": COLOURS[1], "mlp": COLOURS[2], "norm": COLOURS[3], "head": COLOURS[4]}
OTHER = COLOURS[9]
LINE, GAP, THIN = 10.0, 0.09, 0.03  # a full line; between buckets; the least that is drawn of a bucket or slice
CUT = 0.12  # slices at least so wide are also marked in the parameters
LINES = 12  # that a model takes where its buckets are small
NAME, BLOCK, BAR, STRIP, BELOW = 0.19, 0.15, 0.34, 0.17, 0.2  # heights of what is drawn for a bucket, from the top
PITCH = NAME + BLOCK + BAR + STRIP + BELOW
LETTER = 0.0093  # width of a letter per point of its size


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
    """The colour's name for a parameter: of the parts of its name the last that says something, else `other`."""
    parts = ["norm" if part.endswith("norm") else part for part in name.split(".")]
    return next((part for part in reversed(parts) if part in KINDS), "other")


def save_buffer_picture(buffers: RankBuffers, texts: Sequence[str], path: Path, setting: str = "picture") -> None:
    """Draw to a .png or .svg file, which appears only when it is complete; `texts` are a title and lines below it."""
    from matplotlib import style

    draft = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else {}
    plain = {"svg.hashsalt": "megalite", "svg.fonttype": "none", "hatch.linewidth": 0.6}
    try:
        with style.context(["default", plain]):
            figure_of(buffers, texts).savefig(draft, format=kind, dpi=150, metadata=metadata)
        draft.replace(path)
    except OSError as error:
        raise UserError(Problem(setting, str(path), f"cannot be written: {error}", "another file")) from error
    finally:
        draft.unlink(missing_ok=True)


def figure_of(buffers: RankBuffers, texts: Sequence[str]) -> "Figure":
    """The whole picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    buckets = buffers.layout.buckets
    places = places_of([bucket.stop - bucket.start for bucket in buckets])
    header = 0.42 + 0.2 * len(texts)
    size = LINE + 2 * MARGIN, header + PITCH * (1 + places[-1].line) + 0.3 + 2 * MARGIN
    figure = Figure(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, size[0]), ylim=(0, size[1]))
    axes.set_axis_off()
    axes.text(MARGIN, size[1] - MARGIN, texts[0], va="top", size=13, weight="bold", color=INK)
    for number, text in enumerate(texts[1:]):
        axes.text(MARGIN, size[1] - MARGIN - 0.3 - 0.2 * number, text, va="top", size=9.5, color=GREY)
    for bucket, place in zip(buckets, places, strict=True):
        top = size[1] - MARGIN - header - place.line * PITCH
        _Brush(axes, bucket, place, top, buffers.owners[bucket.buffer.kind], buffers.rank).bucket()
    _legend(axes, buffers)
    return figure


@dataclass(frozen=True)
class _Brush:
    """Draws one bucket, whose name begins at height `top`."""

    axes: "Axes"
    content: Bucket
    place: Place
    top: float
    owners: Sequence[int]
    rank: int

    def bucket(self) -> None:
        name = bucket_name(self.place.number, self.content)
        size = _amount(self.content.stop - self.content.start)
        left, width = MARGIN + self.place.left, self.place.width + GAP / 2
        fitting = [text for text in (f"bucket {name}: {size}", f"bucket {name}", name) if _fits(text, width, 8.5)]
        if fitting:
            self.axes.text(left, self.top, fitting[0], va="top", size=8.5, weight="bold", color=INK)
        cursor = self.content.start
        for slot in self.content.slots:
            self._padding(cursor, slot.start)
            self._parameter(slot)
            cursor = slot.stop
        self._padding(cursor, self.content.stop)
        for start, stop, label in _block_spans(self.content.slots):
            self._block(start, stop, label)
        self._owners()

    def _x(self, at: int) -> float:
        """Where an element of the buffer is drawn."""
        share = (at - self.content.start) / max(1, self.content.stop - self.content.start)
        return MARGIN + self.place.left + share * self.place.width

    def _box(self, start: int, stop: int, low: float, height: float, **look: Any) -> float:
        from matplotlib.patches import Rectangle

        width = self._x(stop) - self._x(start)
        self.axes.add_patch(Rectangle((self._x(start), low), width, height, **look))
        return width

    @property
    def _bar(self) -> float:
        """The lower edge of the parameters."""
        return self.top - NAME - BLOCK - BAR

    def _parameter(self, slot: BufferSlot) -> None:
        colour = KINDS.get(kind_of(slot.record.name), OTHER)
        width = self._box(slot.start, slot.stop, self._bar, BAR, facecolor=_light(colour), edgecolor=colour, lw=0.7)
        text = _short_name(slot.record.name)
        if _fits(text, width, 8):  # over the ends of slices
            at = self._x(slot.start) + width / 2, self._bar + BAR / 2
            behind = {"facecolor": _light(colour), "lw": 0, "pad": 0.8}
            self.axes.text(*at, text, ha="center", va="center", size=8, color=INK, bbox=behind, zorder=4)

    def _padding(self, start: int, stop: int) -> None:
        if self._x(stop) - self._x(start) > THIN:
            self._box(start, stop, self._bar, BAR, facecolor="none", edgecolor=NODE_EDGE, hatch="////", lw=0)

    def _block(self, start: int, stop: int, label: str) -> None:
        left, right, y = self._x(start), self._x(stop), self._bar + BAR + 0.03
        self.axes.plot([left + 0.015, right - 0.015], [y, y], color=GREY, lw=1.2, solid_capstyle="butt")
        texts = [text for text in (f"block {label}", label) if _fits(text, right - left, 7)]
        if texts:
            self.axes.text((left + right) / 2, y + 0.015, texts[0], ha="center", va="bottom", size=7, color=GREY)

    def _owners(self) -> None:
        """A strip of slices, and a dashed line through the parameters where one ends; of very thin ones only those that
        the rank owns."""
        low, slice_width = self._bar - STRIP - 0.02, self.place.width / len(self.owners)
        longest = max(self.owners)
        texts = [text for text in ("rank {}", "{}") if _fits(text.format(longest), slice_width, 7)]
        text = texts[0] if texts else ""
        if slice_width < THIN:
            self._slice(self.content.start, self.content.stop, low, "", own=False)
        for index, owner in enumerate(self.owners):
            own = self.content.slice_of(index)
            if slice_width >= THIN or owner == self.rank:
                self._slice(own.start, own.stop, low, text.format(owner), own=owner == self.rank)
            if slice_width >= CUT and index > 0:
                x = self._x(own.start)
                self.axes.plot([x, x], [low, self._bar + BAR], color=INK, lw=0.7, ls=(0, (2, 1.6)), zorder=3)

    def _slice(self, start: int, stop: int, low: float, text: str, *, own: bool) -> None:
        fill, ink = (INK, "white") if own else (NODE_FILL, INK)
        width = self._box(start, stop, low, STRIP, facecolor=fill, edgecolor=NODE_EDGE, lw=0.5)
        if text:
            middle = self._x(start) + width / 2, low + STRIP / 2
            self.axes.text(*middle, text, ha="center", va="center_baseline", size=7, color=ink)


def _block_spans(slots: Sequence[BufferSlot]) -> Iterator[tuple[int, int, str]]:
    """Start, stop and number of each run of slots of one block."""
    for place, run in groupby(slots, key=lambda slot: slot.record.place):
        if isinstance(place, int):
            members = list(run)
            yield members[0].start, members[-1].stop, str(place)


def _short_name(name: str) -> str:
    """`gate_up` for blocks.3.mlp.gate_up.weight, `embedding.word` for embedding.word.weight."""
    parts = name.removesuffix(".weight").split(".")
    return ".".join(parts[3:] if parts[0] == "blocks" and len(parts) > 3 else parts)


def _light(colour: str) -> tuple[float, ...]:
    """The colour in so much white that text is read on it."""
    from matplotlib.colors import to_rgb

    return tuple(1 - 0.32 * (1 - part) for part in to_rgb(colour))


def _fits(text: str, width: float, size: float) -> bool:
    return len(text) * size * LETTER + 0.04 < width


def _amount(elements: int) -> str:
    for unit, scale in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if elements >= scale:
            return f"{elements / scale:.1f} {unit}"
    return str(elements)


def _legend(axes: "Axes", buffers: RankBuffers) -> None:
    from matplotlib.patches import Rectangle

    def entry(left: float, text: str, fill: Any, edge: str, hatch: str = "") -> float:
        """Where the next entry begins."""
        axes.add_patch(Rectangle((left, y), 0.3, 0.17, facecolor=fill, edgecolor=edge, lw=0.7, hatch=hatch))
        axes.text(left + 0.37, y + 0.085, text, va="center_baseline", size=9, color=INK)
        return left + 0.6 + 0.07 * len(text)

    kinds = {kind_of(slot.record.name) for slot in buffers.layout.slots}
    left, y = MARGIN, MARGIN + 0.12
    for kind in (*KINDS, "other"):
        if kind in kinds:
            colour = KINDS.get(kind, OTHER)
            left = entry(left, kind, _light(colour), colour)
    if 100 * padding_of(buffers.layout) > sum(buffers.layout.sizes.values()):
        left = entry(left, "padding", "none", NODE_EDGE, hatch="//////")
    entry(left, f"owned by rank {buffers.rank}", INK, INK)
    text = (
        "Backward completes the gradients from left to right. A rank keeps masters and moments of what it owns. "
        "Widths are to scale, down to what can be seen."
    )
    axes.text(MARGIN, MARGIN - 0.08, text, va="center", size=8.5, color=GREY)
