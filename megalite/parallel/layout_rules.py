"""Which sizes of the axes can be laid out over a world, and what would work where they cannot.

The one check for the launcher's config and for commands: each names the settings in its own way. Each remedy is found
by trying it: the request, changed as it says, breaks no further rule. No torch import.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import isqrt, lcm
from typing import Any

from megalite.config.problems import Problem, UserError
from megalite.config.suggest import nearest
from megalite.parallel.layout import DEFAULT_ORDER, EXPERT_NAME, ParallelLayout, pipeline_strides
from megalite.parallel.remedies import is_whole, number_meant, told

Naming = Callable[[str], str]  # "tp" -> the setting that a user knows it by
LARGEST_FACTORED = 1 << 24  # of worlds beyond any machine, only the small divisors are looked for
SMALL = 4096
SIZES = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp")
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


Accepts = Callable[[LayoutRequest], bool]  # whether a changed request suits what else is said about its sizes


def anything(request: LayoutRequest) -> bool:
    """Nothing else is said."""
    return True


def layout_of(request: LayoutRequest, name: Naming = str, accepts: Accepts = anything) -> ParallelLayout:
    """The layout of a request, or a UserError with everything that is wrong with it."""
    problems = list(layout_problems(request, name, accepts))
    if problems:
        raise UserError(problems)
    return ParallelLayout(
        tp=request.tp,
        cp=request.cp,
        dp=request.world_size // (request.tp * request.cp * request.pp),
        pp=request.pp,
        vpp=request.vpp,
        ep=request.ep,
        etp=(request.etp or request.tp) if request.has_experts else None,
        order=request.order,
    )


def layout_problems(request: LayoutRequest, name: Naming = str, accepts: Accepts = anything) -> Iterator[Problem]:
    """Everything that keeps the request from being laid out. Sizes may be of any type: whatever a user wrote.

    A remedy offers only what `accepts`, the caller's own judgement of the changed request, agrees to.
    """
    judge = _Judge(request, name)
    for one in judge.broken:
        remedy = _hint(one) + _remedy(judge, one, accepts)
        yield Problem(name(one.field), getattr(request, one.field), one.rule, remedy)


def broken_rules(request: LayoutRequest) -> frozenset[tuple[str, str]]:
    """The rules that the request breaks, as (field, kind): to see whether a change would break one more."""
    return _Judge(request, str).keys


def pipeline_sizes(request: LayoutRequest) -> list[int]:
    """The values of pp, ascending, with which the request breaks no rule, or else no further one."""
    judge = _Judge(replace(request, vpp=1), str)
    broken = {size: judge.changed(pp=size).keys for size in judge.factors}
    return [size for size, keys in broken.items() if not keys] or [
        s for s, keys in broken.items() if keys <= judge.keys
    ]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    found = {part for low in range(1, isqrt(number) + 1) if number % low == 0 for part in (low, number // low)}
    return sorted(found)


@dataclass(frozen=True)
class _Broken:
    """A broken rule about `field`, and the fields of which one, changed alone, may mend it."""

    field: str
    kind: str  # tells the rules about one field apart
    rule: str
    fixes: tuple[str, ...]


class _Judge:
    """Judges all that can be judged: a size that is no size counts as 1, so that the others are judged all the same."""

    def __init__(self, request: LayoutRequest, name: Naming) -> None:
        self.request, self.name = request, name
        self.bad = [
            field
            for field in ("world_size", *SIZES)
            if not is_whole(getattr(request, field), 1)
            and not (field in ("dp", "etp") and getattr(request, field) is None)
        ]
        text = request.order.lower() if isinstance(request.order, str) else DEFAULT_ORDER
        self.named = text.split("-")
        self.placed = [axis for axis in dict.fromkeys(self.named) if axis in AXES]
        ones: dict[str, Any] = {field: None if field in ("dp", "etp") else 1 for field in self.bad}
        self.sound = replace(request, **ones)
        self.broken = [*self._sizes(), *self._order(), *self._virtual_stages()]
        misfits = list(self._misfits()) if "world_size" not in self.bad else []
        self.broken += [*self._missing_axes(fits=not misfits), *misfits]
        if not self.broken and self.sound.has_experts:
            self.broken += self._pipelines_disagree()
        self.keys = frozenset((one.field, one.kind) for one in self.broken)

    def changed(self, **changes: Any) -> "_Judge":
        return _Judge(replace(self.request, **changes), self.name)

    @cached_property
    def factors(self) -> list[int]:
        """Sizes worth trying for an axis."""
        world = self.sound.world_size
        if "world_size" in self.bad:
            return list(range(1, 17))
        return divisors(world) if world <= LARGEST_FACTORED else [n for n in range(1, SMALL + 1) if world % n == 0]

    @property
    def split(self) -> tuple[str, ...]:
        """The axes that could be split otherwise."""
        sizes = {axis: getattr(self.sound, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
        return tuple(axis for axis, size in sizes.items() if size is not None and (size > 1 or axis == "dp"))

    def _sizes(self) -> Iterator[_Broken]:
        for field in self.bad:
            yield _Broken(field, "value", "must be a whole number, at least 1", (field,))

    def _order(self) -> Iterator[_Broken]:
        order: Any = self.request.order
        if not isinstance(order, str):
            yield _Broken("order", "text", "must be text, axes joined by '-'", ("order",))
        elif order != order.lower():
            yield _Broken("order", "case", "axes are written in lower case", ("order",))
        for axis in dict.fromkeys(axis for axis in self.named if axis not in AXES):
            yield _Broken("order", f"unknown {axis}", f"{axis!r} is no axis", ("order",))
        repeated = [axis for axis in AXES if self.named.count(axis) > 1]
        if repeated:
            yield _Broken("order", "repeated", f"names {' and '.join(repeated)} more than once", ("order",))

    def _virtual_stages(self) -> Iterator[_Broken]:
        if self.sound.vpp > 1 and self.request.pp == 1:
            rule = f"virtual stages divide the stages of a pipeline, and {self.name('pp')}=1 has none"
            yield _Broken("vpp", "pipeline", rule, ("vpp", "pp"))

    def _missing_axes(self, *, fits: bool) -> Iterator[_Broken]:
        """An axis that the order leaves out has no place unless its size is 1."""
        sizes: dict[str, int | None] = {axis: getattr(self.sound, axis) for axis in SIZES}
        if fits and not self.bad:
            sizes |= self._derived()
        for axis in (axis for axis in AXES if axis not in self.placed):
            split = [each for each in dict.fromkeys((axis, EXPERT_NAME.get(axis, axis))) if (sizes.get(each) or 1) > 1]
            if split:
                # dp and edp are derived: no setting of theirs need exist.
                what = (f"{each if each in ('dp', 'edp') else self.name(each)}={sizes[each]}" for each in split)
                rule = f"has no place for {axis}, but {' and '.join(what)}"
                yield _Broken("order", f"missing {axis}", rule, ("order",))

    def _derived(self) -> dict[str, int]:
        """dp and edp of a request that fits."""
        request = self.sound
        dp = request.world_size // (request.tp * request.cp * request.pp)
        return {"dp": dp, "edp": request.world_size // request.expert_product if request.has_experts else 1}

    def _misfits(self) -> Iterator[_Broken]:
        request, world = self.sound, self.sound.world_size
        dense, expert = request.dense_product, request.expert_product
        exact = request.dp is not None and not {"tp", "cp", "pp"} & {*self.bad}  # else what is missing may mend it
        if world != dense if exact else world % dense:
            axes = ("tp", "cp", "pp") if request.dp is None else ("tp", "cp", "pp", "dp")
            rule = "not a multiple of"
            if exact:
                rule = f"{'larger' if world > dense else 'smaller'} than the layout:"
            rule = f"{rule} {self._product(axes)} = {dense}"
            yield _Broken("world_size", "dense", rule, ("world_size", *self.split))
        if world % expert:
            product_ = self._product(("tp" if request.etp is None else "etp", "ep", "pp"))
            rule = f"not a multiple of {product_} = {expert}, the ranks of one set of experts"
            yield _Broken("world_size", "expert", rule, ("world_size", *self.split))

    def _product(self, axes: tuple[str, ...]) -> str:
        return " x ".join(f"{self.name(axis)}={getattr(self.sound, axis)}" for axis in axes if axis not in self.bad)

    def _pipelines_disagree(self) -> Iterator[_Broken]:
        """Activations flow along one pipeline, so dense layers and experts must agree who is next."""
        request, name = self.sound, self.name
        etp = request.etp or request.tp
        sizes = {axis: getattr(request, axis) for axis in ("tp", "cp", "pp", "ep")} | {"etp": etp} | self._derived()
        dense, expert = pipeline_strides(request.order, sizes)
        if request.pp > 1 and dense != expert:
            rule = (
                f"neighbouring stages are {dense} ranks apart for dense layers ({name('tp')}={request.tp}, "
                f"{name('cp')}={request.cp}), {expert} for experts ({name('etp')}={etp}, {name('ep')}={request.ep})"
            )
            yield _Broken("order", "pipelines", rule, ("order", *(axis for axis in self.split if axis != "dp")))


def _hint(one: _Broken) -> str:
    """What stands before the order that would work."""
    kind, _, axis = one.kind.partition(" ")
    if one.field != "order" or kind not in ("text", "unknown", "repeated"):
        return ""
    meant = ""
    if axis in EXPERT_NAME.values():  # etp, edp
        place = next(dense for dense, expert in EXPERT_NAME.items() if expert == axis)
        meant = f"{axis} takes the place of {place}; "
    elif near := nearest(axis, AXES, cutoff=0.3) if axis else None:
        meant = f"{near} is the nearest; "
    return f"{meant}{', '.join(AXES)}, each at most once, like "


def _remedy(judge: _Judge, one: _Broken, accepts: Accepts) -> str:
    """Single changes after which no rule is broken; failing that, no rule but those that are reported as well, and at
    the very least none of a layout.

    Where the sizes do not fill the world and no other single size would, two of them that do are named, too.
    """
    others = judge.keys - {(one.field, one.kind)}
    for allowed, agrees in ((frozenset[Any](), accepts), (others, accepts), (others, anything)):
        found = {field: _working(judge, field, allowed, agrees) for field in one.fixes}
        texts = [_told(judge.name(field), values) for field, values in found.items() if values]
        if one.field == "world_size" and not any(values for field, values in found.items() if field != one.field):
            texts += _pair(judge, one.fixes[1:], allowed, agrees)
        if texts:
            return ", or ".join(texts)
    return _plain_remedy(judge)


def _working(judge: _Judge, field: str, allowed: frozenset[Any], accepts: Accepts) -> list[Any]:
    """The nearest few values of `field` that leave only the `allowed` rules broken."""
    wanted = {"order": 1, "world_size": 2}.get(field, 3)
    found: list[Any] = []
    for value in _candidates(judge, field):
        if judge.changed(**{field: value}).keys <= allowed and accepts(replace(judge.request, **{field: value})):
            found.append(value)
        if len(found) == wanted:
            break
    return found


def _pair(judge: _Judge, fields: tuple[str, ...], allowed: frozenset[Any], accepts: Accepts) -> Iterator[str]:
    """Two sizes that work together, the nearest of the first pair of axes that has any."""
    for first, second in combinations(fields, 2):
        tried = product(*(enumerate([*_candidates(judge, field)][:8]) for field in (first, second)))
        for (_, one), (_, other) in sorted(tried, key=lambda both: both[0][0] + both[1][0]):
            changes: dict[str, Any] = {first: one, second: other}
            if judge.changed(**changes).keys <= allowed and accepts(replace(judge.request, **changes)):
                yield " with ".join(_told(judge.name(field), [value]) for field, value in changes.items())
                return


def _plain_remedy(judge: _Judge) -> str:
    """Back to data parallelism alone: it always works."""
    changes: dict[str, Any] = {
        field: None if field in ("dp", "etp") else 1
        for field in SIZES
        if getattr(judge.request, field) not in (1, None) or field in judge.bad
    }
    if judge.request.dp is not None:
        changes["dp"] = None
    if "world_size" in judge.bad:
        changes["world_size"] = 1
    if judge.changed(**changes).keys:
        changes["order"] = DEFAULT_ORDER
    return ", and ".join(_told(judge.name(field), [value]) for field, value in changes.items())


def _told(name: str, values: list[Any]) -> str:
    """An order is told as it is written; `told` would quote it."""
    return f"{name}={values[0]}" if isinstance(values[0], str) else told(name, values)


def _candidates(judge: _Judge, field: str) -> Iterator[Any]:
    """Values worth trying for one field, the nearest first."""
    near = number_meant(getattr(judge.request, field)) if field != "order" else 0
    if field == "order":
        completed = judge.placed + [axis for axis in AXES if axis not in judge.placed]
        yield from ("-".join(judge.placed if judge.placed == judge.named else completed), "-".join(completed))
        yield from ("-".join([*(axis for axis in completed if axis != "pp"), "pp"]), DEFAULT_ORDER)
    elif field == "world_size":
        dense, expert = judge.sound.dense_product, judge.sound.expert_product
        steps = (lcm(dense, expert), dense, expert)  # the latter two for one of several problems
        worlds = (world for step in steps for world in (near // step * step, (near // step + 1) * step, step))
        yield from (world for world in dict.fromkeys(worlds) if world > 0)
    else:
        sizes = range(1, 17) if field == "vpp" else judge.factors
        yield from sorted(sizes, key=lambda size: abs(size - near))
