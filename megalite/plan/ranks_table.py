"""Writes a layout as text: the groups of every axis, as tables or JSON, the layers of stages, the experts of ranks.

Tables and JSON say the same: both read `ParallelLayout.groups`. No torch import.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import TextWrapper
from typing import Any

from megalite.layout.parameters import ParameterRecord, shard
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import StageLayers
from megalite.layout.summary import header_lines

SETS = {  # of axes whose groups are shown
    "dense": ("tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp", "tp-dp-cp"),
    "expert": ("etp", "ep", "edp", "pp", "etp-ep", "etp-ep-pp"),
}


@dataclass(frozen=True)
class HeldExperts:
    """Experts [first, first + count) of a layer, and the ranks that hold them, or a piece of each."""

    first: int
    count: int
    ranks: list[int]

    def __str__(self) -> str:
        """`4-7`"""
        return str(self.first) if self.count == 1 else f"{self.first}-{self.first + self.count - 1}"


def held_experts(layout: ParallelLayout, experts: int) -> list[HeldExperts]:
    """Who holds which of the `experts` of a layer; empty where there are none."""
    record = ParameterRecord("experts", (experts,), "ones", 0.0, decay=False, of_experts=True)
    found = []
    for index, ranks in enumerate(layout.groups("etp-edp-pp") if experts else ()):
        (box,) = shard(record, ep=(layout.ep, index)).boxes
        found.append(HeldExperts(box.offsets[0], box.sizes[0], ranks))
    return found


def json_lines(
    layout: ParallelLayout, stages: Sequence[StageLayers] = (), held: Sequence[HeldExperts] = ()
) -> Iterator[str]:
    """One JSON object, {"dense": {"tp": [[0, 1], ...], ...}, "expert": {...}}; if given, "stages" and "experts"."""
    shown: dict[str, Any] = {name: {axes: layout.groups(axes) for axes in sets} for name, sets in _sets(layout).items()}
    shown |= {"stages": [asdict(stage) for stage in stages]} if stages else {}
    yield json.dumps(shown | ({"experts": [asdict(each) for each in held]} if held else {}))


def table_lines(layout: ParallelLayout, width: int) -> Iterator[str]:
    """All groups as tables, lines of at most `width` characters; no group of one line is broken."""
    yield from (line for text in header_lines(layout) for line in _wrapped(text, " ", width))
    digits = len(str(layout.world_size))
    for section, sets in _sets(layout).items():
        if sets:
            yield from ("", f"{section}:")
        for axes in sets:
            groups = layout.groups(axes)
            noun = "group " if len(groups) == 1 else "groups"
            label = f"  {axes:<9} {len(groups):>{digits}} {noun} of {f'{len(groups[0])}:':<{digits + 1}} "
            if len(groups[0]) == 1 and len(groups) > 1:
                yield f"{label}each rank alone"
                continue
            texts = [f"[{' '.join(map(str, group))}]" for group in groups]
            if max(map(len, texts)) <= width - len(label):
                texts = [text.replace(" ", "\N{NO-BREAK SPACE}") for text in texts]
            lines = _wrapped(label.replace(" ", "\N{NO-BREAK SPACE}") + " ".join(texts), " " * len(label), width)
            yield from (line.replace("\N{NO-BREAK SPACE}", " ") for line in lines)


def stage_lines(stages: Sequence[StageLayers]) -> Iterator[str]:
    """Which layers each pipeline rank holds in each of its chunks, a line per stage in the order of the layers."""
    chunked = len(stages) > 1 + max(stage.pp_rank for stage in stages)
    sided = len({stage.side for stage in stages}) > 1
    digits = len(str(len(stages)))
    yield "stages:"
    for stage in stages:
        chunk = f", chunk {stage.chunk:<{digits}}" if chunked else ""
        side = f"{stage.side}, " if sided else ""
        extras = ["embedding"] * stage.embedding + ["loss"] * stage.loss
        held = f" ({', '.join(extras)})" if extras else ""
        layers = f"{stage.count} layers, {stage.first}-{stage.first + stage.count - 1}"
        if stage.count < 2:
            layers = f"1 layer, {stage.first}" if stage.count else "no layers"
        yield f"  pp rank {stage.pp_rank:<{digits}}{chunk}: {side}{layers}{held}"


def expert_lines(held: Sequence[HeldExperts]) -> Iterator[str]:
    """Which ranks hold the same experts, a line for each part of them."""
    yield "experts of a layer:"
    width = max(len(str(each)) for each in held)
    for each in held:
        yield f"  {each!s:<{width}}  ranks {' '.join(map(str, each.ranks))}"


def _sets(layout: ParallelLayout) -> dict[str, tuple[str, ...]]:
    return SETS if layout.has_experts else {"dense": SETS["dense"], "expert": ()}


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return TextWrapper(max(width, 20), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False).wrap(
        text
    )
