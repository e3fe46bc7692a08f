"""A layout as text, JSON and picture: the groups of every axis, the layers of stages, the experts of ranks."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from megalite.errors.problems import several
from megalite.layout.ranks import ParallelLayout, header_lines
from megalite.layout.stages import StageLayers
from megalite.plan.picture import LETTER, Picture

SETS = {  # of axes whose groups are listed
    "dense": ("tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp", "tp-dp-cp"),
    "expert": ("etp", "ep", "edp", "pp", "etp-ep", "etp-ep-pp"),
}
ACROSS = 8  # ranks on a line of the picture
MOST_RANKS = 144  # of a larger world the first are drawn: 18 nodes of 8, two racks of 72
COLOURS = 10  # by group of the first axis that is split
LEFT, WIDE, GAP, LINE = 54, 80, 6, 16  # room for a node's name; a rank's box, the free space around it, its lines
Groups = dict[str, dict[str, list[list[int]]]]  # of ranks, by section and axes


def groups_of(layout: ParallelLayout, experts: int = 0) -> Groups:
    """{"dense": {"tp": [[0, 1], ...], ...}, "expert": {...}}. With a number of `experts`, a multiple of ep, "experts"
    has the ranks that hold the same ones of a layer, or a piece of each: {"0-3": [[0, 2]], ...}."""
    known = SETS if layout.has_experts else {"dense": SETS["dense"], "expert": ()}
    groups = {section: {axes: layout.groups(axes) for axes in sets} for section, sets in known.items()}
    if experts:
        count, holders = experts // layout.ep, layout.groups("etp-edp-pp")
        groups["experts"] = {f"{at * count}-{(at + 1) * count - 1}": [ranks] for at, ranks in enumerate(holders)}
    return groups


def table_lines(groups: Groups, world_size: int, width: int) -> Iterator[str]:
    """All groups as tables, lines of at most `width` characters."""
    digits = len(str(world_size))
    for section, sets in groups.items():
        yield from ("", f"{section}:") if sets else ()
        for axes, its in sets.items():
            noun = "group " if len(its) == 1 else "groups"
            label = f"  {axes:<9} {len(its):>{digits}} {noun} of {f'{len(its[0])}:':<{digits + 1}} "
            members = " ".join(f"[{' '.join(map(str, group))}]" for group in its)
            if len(its[0]) == 1 < len(its):
                members = "each rank alone"
            first, *others = wrap(members, max(20, width - len(label)))
            yield from (label + first, *(" " * len(label) + line for line in others))


def stage_lines(stages: Sequence[StageLayers]) -> Iterator[str]:
    """Which layers each pipeline rank holds in each of its chunks, a line per stage in the order of the layers."""
    yield "stages:"
    for stage in stages:
        side = "encoder, " if stage.side == "encoder" else ""
        layers = f"{several(stage.count, 'layer')}, {stage.first}-{stage.first + stage.count - 1}"
        extras = ["embedding"] * stage.embedding + ["loss"] * stage.loss
        held = f" ({', '.join(extras)})" if extras else ""
        yield f"  pp rank {stage.pp_rank}, chunk {stage.chunk}: {side}{layers if stage.count else 'no layers'}{held}"


def ranks_picture(layout: ParallelLayout, ranks_per_node: int, experts: int = 0) -> Picture:
    """Ranks in their nodes, which they fill in order, as launchers place them. A rank says which group of each axis
    that is split it belongs to ("tp 3"), and which of the `experts` of a layer it holds."""
    groups = {axis: layout.groups(axis) for axis, size in layout.sizes.items() if size > 1}
    lines = header_lines(layout)
    for axis, its in groups.items():
        crossing = sum(group[0] // ranks_per_node != group[-1] // ranks_per_node for group in its)
        lines.append(f"{axis}: {several(len(its), 'group')} of {len(its[0])}, {crossing} across nodes")
    lines += [f"drawn: ranks 0 to {MOST_RANKS - 1}"] if layout.world_size > MOST_RANKS else []
    named = [(f"{axis} {number}", group) for axis in groups for number, group in enumerate(groups[axis])]
    named += [(f"experts {part}", ranks) for part, (ranks,) in groups_of(layout, experts).get("experts", {}).items()]
    words = {rank: [f"rank {rank}"] for rank in range(min(layout.world_size, MOST_RANKS))}
    for word, ranks in named:
        for rank in words.keys() & ranks:
            words[rank].append(word)
    picture = Picture("ranks of a layout")
    for at, line in enumerate(lines):
        picture.text(0, 14 + 18 * at, line, "" if at else "title")
    in_node, high = min(ranks_per_node, len(words)), LINE * len(words[0]) + 8
    wide, tall = min(in_node, ACROSS) * (WIDE + GAP) + GAP, -(-in_node // ACROSS) * (high + GAP) + GAP
    for rank, about in words.items():
        node, place = divmod(rank, in_node)
        top = 18 * len(lines) + 6 + node * (tall + 10)
        if place == 0:
            picture.rect(LEFT, top, wide, tall, "node")
            picture.text(LEFT - 8, top + tall / 2 + 4, f"node {node}", "end")
        x, y = LEFT + GAP + place % ACROSS * (WIDE + GAP), top + GAP + place // ACROSS * (high + GAP)
        picture.rect(x, y, WIDE, high, f"rank c{int(about[1].split()[1]) % COLOURS if groups else 0}")
        for at, word in enumerate(about, 1):
            picture.text(x + WIDE / 2, y + LINE * at, word, "mid strong" if at == 1 else "mid")
    picture.height = 18 * len(lines) + -(-len(words) // in_node) * (tall + 10)
    picture.width = max(LEFT + wide, LETTER * max(map(len, lines)), 640.0)  # a page shows it no smaller
    return picture
