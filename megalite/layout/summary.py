"""Says in two or three lines what a layout is: its axes, those of the experts, and the groups of its first rank."""

from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, ParallelLayout


def header_lines(layout: ParallelLayout) -> list[str]:
    """Two or three lines about a layout of any size: its axes, those of the experts, and whom its first rank meets."""
    split = {axis: size for axis, size in layout.sizes.items() if size > 1}
    dense, expert = ({axis: split[axis] for axis in axes if axis in split} for axes in (DENSE_AXES, EXPERT_AXES))
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    many = max(len(dense), len(expert)) > 1
    lines = [f"{ranks}: {_product(layout, dense)}" if dense else ranks]
    if many:
        lines[0] += f", order {layout.order}"
    if layout.has_experts:
        lines.append(f"experts: {_product(layout, expert) if expert else ranks}")
    if many:
        groups = (f"{axis} {_shortened(layout.group_of(0, axis))}" for axis in dense | expert)
        lines.append(f"rank 0: {', '.join(groups)}")
    return lines


def _product(layout: ParallelLayout, sizes: dict[str, int]) -> str:
    chunks = f" (vpp {layout.vpp})" if layout.vpp > 1 else ""
    return " x ".join(f"{axis} {size}{chunks if axis == 'pp' else ''}" for axis, size in sizes.items())


def _shortened(ranks: list[int]) -> str:
    """A group of one axis, whose ranks are evenly spaced: `0-3`, `0 4 8`, `0 4 8 .. 60`."""
    if len(ranks) > 2 and ranks[1] - ranks[0] == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks if len(ranks) <= 5 else [*ranks[:3], "..", ranks[-1]]))
