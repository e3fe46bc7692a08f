"""Says in one to three lines what a layout is: the axes, those of the experts, and whom the first rank meets."""

from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, ParallelLayout


def header_lines(layout: ParallelLayout) -> list[str]:
    """The lines about a layout of any size."""
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    split = {axis: size for axis, size in layout.sizes.items() if size > 1}
    chunks = f" (vpp {layout.vpp})" if layout.vpp > 1 else ""
    products = [
        " x ".join(f"{axis} {split[axis]}{chunks if axis == 'pp' else ''}" for axis in axes if axis in split)
        for axes in (DENSE_AXES, EXPERT_AXES)
    ]
    many = any(" x " in product for product in products)
    lines = [f"{ranks}: {products[0]}" if products[0] else ranks]
    if many:
        lines[0] += f", order {layout.order}"
    if layout.has_experts:
        lines.append(f"experts: {products[1] or ranks}")
    if many:
        groups = [(axis, layout.group_of(0, axis)) for axis in split]
        shown = (f"{axis} {' '.join(map(str, group[:3]))}{' ..' * (len(group) > 3)}" for axis, group in groups)
        lines.append(f"rank 0: {', '.join(shown)}")
    return lines
