"""Which sizes of the axes can be laid out over a world, and what would work where they cannot.

The one check for the launcher's config and for commands: each names the settings in its own way. No torch import.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isqrt, lcm
from typing import Any

from megalite.config.problems import Problem, UserError
from megalite.config.suggest import nearest
from megalite.parallel.layout import DEFAULT_ORDER, EXPERT_NAME, ParallelLayout

Naming = Callable[[str], str]  # "tp" -> the setting that a user knows it by
LARGEST_FACTORED = 1 << 24  # worlds beyond any machine are not searched for sizes that would fit
SIZES = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp")


@dataclass(frozen=True)
class LayoutRequest:
    """What a user asks for. `dp=None`: what remains of the world; `etp=None`: tp. `ep` above 1, an `etp` or `experts`
    make it the layout of a mixture of experts."""

    world_size: int
    tp: int = 1
    cp: int = 1
    dp: int | None = None
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    experts: bool = False
    order: str = DEFAULT_ORDER

    @property
    def has_experts(self) -> bool:
        return self.experts or self.ep > 1 or self.etp is not None

    @property
    def dense_product(self) -> int:
        """Ranks that hold one copy of the dense layers; where dp is given, all copies."""
        return self.tp * self.cp * self.pp * (self.dp or 1)

    @property
    def expert_product(self) -> int:
        """Ranks that hold one copy of the experts; 1 without any."""
        return (self.etp or self.tp) * self.ep * self.pp if self.has_experts else 1

    @property
    def fits(self) -> bool:
        """Whether both numberings fill the world exactly."""
        dense = self.dense_product == self.world_size if self.dp else self.world_size % self.dense_product == 0
        return dense and self.world_size % self.expert_product == 0


def layout_of(request: LayoutRequest, name: Naming = str) -> ParallelLayout:
    """The layout of a request, or a UserError with everything that is wrong with it."""
    problems = list(layout_problems(request, name))
    if problems:
        raise UserError(problems)
    return _layout(request)


def layout_problems(request: LayoutRequest, name: Naming = str) -> Iterator[Problem]:
    """Everything that keeps the request from being laid out. Sizes may be of any type: whatever a user wrote."""
    bad = list(_bad_sizes(request, name))
    yield from bad
    bad_order = list(_unknown_axes(request.order, name))
    yield from bad_order
    if bad or not isinstance(request.order, str):
        return
    missing = list(_missing_axes(request, name))
    yield from missing
    if request.vpp > 1 and request.pp == 1:
        rule = f"virtual stages divide the stages of a pipeline, and {name('pp')}=1 has none"
        yield Problem(name("vpp"), request.vpp, rule, f"{name('vpp')}=1, or {name('pp')}=2 or more")
    if not request.fits:
        yield from _misfits(request, name)
    elif request.has_experts and not bad_order and not missing:
        yield from _pipelines_disagree(request, name)


def _layout(request: LayoutRequest) -> ParallelLayout:
    return ParallelLayout(
        tp=request.tp,
        cp=request.cp,
        dp=request.dp or request.world_size // request.dense_product,
        pp=request.pp,
        vpp=request.vpp,
        ep=request.ep,
        etp=(request.etp or request.tp) if request.has_experts else None,
        order=request.order,
    )


def _bad_sizes(request: LayoutRequest, name: Naming) -> Iterator[Problem]:
    for field in ("world_size", *SIZES):
        size: Any = getattr(request, field)
        whole = isinstance(size, int) and not isinstance(size, bool)
        if size is None and field in ("dp", "etp"):
            continue
        if not whole or size < 1:
            example = "the number of processes, 1 or more" if field == "world_size" else f"{name(field)}=1 or more"
            rule = "must be at least 1" if whole else "must be a whole number"
            yield Problem(name(field), size, rule, example)


def _unknown_axes(order: Any, name: Naming) -> Iterator[Problem]:
    axes = DEFAULT_ORDER.split("-")
    named = order.split("-") if isinstance(order, str) else []
    example = f"{', '.join(axes)}, each at most once, like {name('order')}={DEFAULT_ORDER}"
    if not isinstance(order, str):
        yield Problem(name("order"), order, "must be text, axes joined by '-'", example)
    for axis in dict.fromkeys(axis for axis in named if axis not in axes):
        near = nearest(axis, tuple(axes), cutoff=0.3)
        hint = f"{near} is the nearest; " if near else ""
        if axis in EXPERT_NAME.values():  # etp, edp
            place = next(dense for dense, expert in EXPERT_NAME.items() if expert == axis)
            hint = f"{axis} takes the place of {place}; "
        yield Problem(name("order"), order, f"{axis!r} is no axis", f"{hint}{example}")
    repeated = [axis for axis in axes if named.count(axis) > 1]
    if repeated:
        yield Problem(name("order"), order, f"names {' and '.join(repeated)} more than once", example)


def _missing_axes(request: LayoutRequest, name: Naming) -> Iterator[Problem]:
    """An axis that the order leaves out has no place unless its size is 1."""
    axes = DEFAULT_ORDER.split("-")
    named = [axis for axis in dict.fromkeys(request.order.split("-")) if axis in axes]
    sizes = {axis: getattr(request, axis) for axis in SIZES}
    if request.fits:
        layout = _layout(request)
        sizes |= {"dp": layout.dp, "edp": layout.edp}
    missing = [axis for axis in axes if axis not in named]
    for axis in missing:
        split = [each for each in dict.fromkeys((axis, EXPERT_NAME.get(axis, axis))) if (sizes.get(each) or 1) > 1]
        if split:
            what = " and ".join(f"{_shown(each, name)}={sizes[each]}" for each in split)
            completed = (
                sorted(named + missing, key=lambda each: each == "pp") if request.has_experts else named + missing
            )
            remedy = f"{name('order')}={'-'.join(completed)}"
            yield Problem(name("order"), request.order, f"has no place for {axis}, but {what}", remedy)


def _shown(axis: str, name: Naming) -> str:
    """dp and edp are derived: no setting of theirs need exist."""
    return axis if axis in ("dp", "edp") else name(axis)


def _misfits(request: LayoutRequest, name: Naming) -> Iterator[Problem]:
    world, dense, expert = request.world_size, request.dense_product, request.expert_product
    works = _working_sizes(request, name)
    if request.dp is not None and world != dense:
        more = "larger" if world > dense else "smaller"
        rule = f"{more} than the layout: {_product(request, ('tp', 'cp', 'pp', 'dp'), name)} = {dense}"
        remedy = [f"{name('world_size')}={dense}"] if dense % expert == 0 else []
        yield Problem(name("world_size"), world, rule, ", or ".join([*remedy, *works]))
    elif world % dense:
        rule = f"not a multiple of {_product(request, ('tp', 'cp', 'pp'), name)} = {dense}"
        yield Problem(name("world_size"), world, rule, ", or ".join([_worlds(request, name), *works]))
    if world % expert:
        product = _product(request, ("etp", "ep", "pp"), name)
        rule = f"not a multiple of {product} = {expert}, the ranks of one set of experts"
        remedy = [_worlds(request, name)] if request.dp is None else []
        yield Problem(name("world_size"), world, rule, ", or ".join([*remedy, *works]))


def _product(request: LayoutRequest, axes: tuple[str, ...], name: Naming) -> str:
    sizes = {axis: getattr(request, axis) for axis in axes}
    if "etp" in sizes and request.etp is None:
        sizes = {"tp" if axis == "etp" else axis: size or request.tp for axis, size in sizes.items()}
    return " x ".join(f"{name(axis)}={size}" for axis, size in sizes.items())


def _worlds(request: LayoutRequest, name: Naming) -> str:
    """The nearest numbers of processes that both numberings fill."""
    step = lcm(request.dense_product, request.expert_product)
    below = request.world_size // step * step
    worlds = [str(world) for world in (below, below + step) if world > 0]
    return f"{name('world_size')}={' or '.join(worlds)}"


def _working_sizes(request: LayoutRequest, name: Naming) -> list[str]:
    """For each axis that could be changed alone, the sizes nearest to the given one that fit this world."""
    works: list[str] = []
    if request.world_size > LARGEST_FACTORED:
        return ["sizes whose products divide it"]
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp"):
        size = getattr(request, axis)
        if size is None or (size == 1 and axis != "dp"):
            continue
        changes: list[dict[str, Any]] = [{axis: each} for each in divisors(request.world_size)]
        fitting = [change[axis] for change in changes if replace(request, **change).fits]
        nearest_three = sorted(sorted(fitting, key=lambda each: abs(each - size))[:3])
        if nearest_three:
            works.append(f"{name(axis)}={' or '.join(map(str, nearest_three))}")
    return works or ["sizes whose products divide it"]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    found = {part for low in range(1, isqrt(number) + 1) if number % low == 0 for part in (low, number // low)}
    return sorted(found)


def _pipelines_disagree(request: LayoutRequest, name: Naming) -> Iterator[Problem]:
    """Activations flow along one pipeline, so dense layers and experts must agree who is next.

    A pipeline is an arithmetic sequence of ranks, and in both numberings one starts at rank 0: they agree where the
    strides do.
    """
    layout = _layout(request)
    assert layout.expert is not None
    dense, expert = layout.dense.strides["pp"], layout.expert.strides["pp"]
    if layout.pp > 1 and dense != expert:
        rule = (
            f"neighbouring stages are {dense} ranks apart for dense layers ({name('tp')}={layout.tp}, "
            f"{name('cp')}={layout.cp}), {expert} for experts ({name('etp')}={layout.etp}, {name('ep')}={layout.ep})"
        )
        pp_last = "-".join([*(axis for axis in layout.complete_order if axis != "pp"), "pp"])
        yield Problem(name("order"), request.order, rule, f"{name('order')}={pp_last}, or sizes that make both equal")
