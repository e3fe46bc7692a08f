"""Which sizes of the axes can be laid out over a world."""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.layout.flaws import Flaw, Show, refuse, shown_by
from megalite.layout.ranks import DEFAULT_ORDER, EXPERT_NAME, ParallelLayout, pipeline_strides

AXES = tuple(DEFAULT_ORDER.split("-"))


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
    def sizes(self) -> dict[str, int]:
        """All axes, the derived ones too, of a request that fills the world."""
        experts = (
            {"etp": self.etp or self.tp, "edp": self.world_size // self.expert_product} if self.has_experts else {}
        )
        dp = self.world_size // (self.tp * self.cp * self.pp)
        return {"tp": self.tp, "cp": self.cp, "dp": dp, "pp": self.pp, "ep": self.ep} | experts

    @property
    def split(self) -> tuple[str, ...]:
        """The axes that could be split otherwise."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp, "ep": self.ep, "etp": self.etp}
        return tuple(axis for axis, size in sizes.items() if size is not None and (size > 1 or axis == "dp"))


def layout_of(request: LayoutRequest) -> ParallelLayout:
    """The layout of a request. Raises ValueError with all of `layout_flaws`."""
    refuse(layout_flaws(request))
    sizes, experts = request.sizes, request.has_experts
    return ParallelLayout(
        **{axis: sizes[axis] for axis in AXES},
        vpp=request.vpp,
        etp=sizes["etp"] if experts else None,
        order=request.order,
    )


def layout_flaws(request: LayoutRequest, show: Show | None = None) -> list[Flaw]:
    """Everything that keeps the request from being laid out. Sizes are at least 1."""
    rules = (order_names_axes_once, virtual_stages_need_a_pipeline, split_axes_have_a_place, sizes_fill_the_world)
    show = show or shown_by(request)
    flaws = [flaw for rule in rules for flaw in rule(request, show)]
    return flaws or list(pipelines_agree(request, show))


def order_names_axes_once(request: LayoutRequest, show: Show) -> Iterator[Flaw]:
    named = request.order.lower().split("-")
    if request.order != request.order.lower():
        yield Flaw("order", "case", "axes are written in lower case", ("order",))
    for axis in dict.fromkeys(axis for axis in named if axis not in AXES):
        stands_for = next((dense for dense, expert in EXPERT_NAME.items() if expert == axis), None)
        hint = f" ({axis} takes the place of {stands_for})" if stands_for else ""
        yield Flaw("order", f"unknown {axis}", f"{axis!r} is no axis of {', '.join(AXES)}{hint}", ("order",))
    if repeated := [axis for axis in AXES if named.count(axis) > 1]:
        yield Flaw("order", "repeated", f"names {' and '.join(repeated)} more than once", ("order",))


def virtual_stages_need_a_pipeline(request: LayoutRequest, show: Show) -> Iterator[Flaw]:
    if request.vpp > 1 and request.pp == 1:
        rule = f"virtual stages divide the stages of a pipeline, and {show('pp')} has none"
        yield Flaw("vpp", "pipeline", rule, ("vpp", "pp"))


def split_axes_have_a_place(request: LayoutRequest, show: Show) -> Iterator[Flaw]:
    """An axis that the order leaves out has no place unless its size is 1."""
    fills = not any(sizes_fill_the_world(request, show))
    named, sizes = request.order.lower().split("-"), request.sizes
    for axis in (axis for axis in AXES if axis not in named):
        both = [each for each in dict.fromkeys((axis, EXPERT_NAME.get(axis, axis))) if sizes.get(each, 1) > 1]
        # dp and edp are derived: no setting of theirs need exist, and they have a size only if the world is filled.
        split = [each for each in both if fills or each not in ("dp", "edp")]
        if split:
            told = (f"{each}={sizes[each]}" if each in ("dp", "edp") else show(each) for each in split)
            yield Flaw("order", f"missing {axis}", f"has no place for {axis}, but {' and '.join(told)}", ("order",))


def sizes_fill_the_world(request: LayoutRequest, show: Show) -> Iterator[Flaw]:
    world, dense, expert = request.world_size, request.dense_product, request.expert_product
    fixes = ("world_size", *request.split)
    if world % dense if request.dp is None else world != dense:
        axes = ("tp", "cp", "pp") if request.dp is None else ("tp", "cp", "pp", "dp")
        rule = "not a multiple of"
        if request.dp is not None:
            rule = f"{'larger' if world > dense else 'smaller'} than the layout:"
        yield Flaw("world_size", "dense", f"{rule} {' x '.join(map(show, axes))} = {dense}", fixes)
    if world % expert:
        axes = ("tp" if request.etp is None else "etp", "ep", "pp")
        rule = f"not a multiple of {' x '.join(map(show, axes))} = {expert}, the ranks of one set of experts"
        yield Flaw("world_size", "expert", rule, fixes)


def pipelines_agree(request: LayoutRequest, show: Show) -> Iterator[Flaw]:
    """Activations flow along one pipeline, so dense layers and experts must agree who is next."""
    if request.pp == 1 or not request.has_experts:
        return
    dense, expert = pipeline_strides(request.order, request.sizes)
    if dense != expert:
        etp = show("tp" if request.etp is None else "etp")
        rule = (
            f"neighbouring stages are {dense} ranks apart for dense layers ({show('tp')}, {show('cp')}), "
            f"{expert} for experts ({etp}, {show('ep')})"
        )
        yield Flaw("order", "pipelines", rule, ("order", *(axis for axis in request.split if axis != "dp")))
