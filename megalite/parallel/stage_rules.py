"""Which settings of the pipeline's stages are accepted, and what to change where they are not.

A rule that drops a layer or leaves a stage empty unasked is the classic silent mistake of pipelines, so every setting
is judged before any stage is built. Each remedy is found by trying it: the settings that it names, changed as it says,
break no further rule.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megalite.config.problems import Problem
from megalite.parallel.remedies import is_whole, number_meant, told
from megalite.parallel.stage_string import Layout, LayoutError, example_layout, layout_counts, without_prediction

REACH = 1000  # how far from the given number a working one is looked for


@dataclass(frozen=True)
class StageSettings:
    """What the user says about who holds which of `num_layers` layers, on `pp` pipeline ranks.

    Layers are divided evenly over the pp * vpp stages, except that
    - `standalone_embedding`: rank 0 holds none in any of its chunks, the other ranks share all;
    - `first_layers`, `last_layers`: so many on the first or last rank, all of its chunks together; the others share the
      rest (0 is allowed);
    - `count_embedding`, `count_loss`: the embedding or the loss takes the place of one layer in its stage;
    - `layout`: said stage by stage, see `stage_string`;
    - `split_rank`: an encoder and a decoder of `num_layers` each; this is the decoder's first rank. A standalone
      embedding takes one of the encoder's ranks.
    """

    num_layers: int
    pp: int
    vpp: int | None = None  # chunks of each rank; None: as many as the layout has, else 1
    standalone_embedding: bool = False
    split_rank: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    layout: Layout | None = None

    def asks_for(self, field: str) -> bool:
        """Whether the rule called `field` differs from plain division."""
        value = getattr(self, field)
        return value not in (None, 1) if field == "vpp" else value is not None and value is not False


DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(StageSettings) if field.name not in ("num_layers", "pp")
}
FIELD_NAMES = {field.name: field.name for field in fields(StageSettings)}

# A rule says it, or one of the others: both at once would place the same layers twice.
EXCLUDED_BY = {
    "vpp": ("split_rank",),
    "standalone_embedding": ("layout",),
    "split_rank": ("layout",),
    "first_layers": ("layout", "split_rank", "standalone_embedding"),
    "last_layers": ("layout", "split_rank"),
    "count_embedding": ("layout", "split_rank", "standalone_embedding", "first_layers", "last_layers"),
    "count_loss": ("layout", "split_rank", "standalone_embedding", "first_layers", "last_layers"),
}


Accepts = Callable[[StageSettings], bool]  # whether changed settings suit what else is said about the sizes


def anything(settings: StageSettings) -> bool:
    """Nothing else is said."""
    return True


def stage_problems(
    settings: StageSettings,
    names: Mapping[str, str] = FIELD_NAMES,
    pp_sizes: Collection[int] | None = None,
    accepts: Accepts = anything,
) -> list[Problem]:
    """Everything that is wrong with the settings, each with values that would work; empty where they are accepted.

    `names` maps the fields of `StageSettings` to the settings that the user knows (`model.num_layers`, `--num-layers`);
    a remedy never offers a field that is missing from it. `pp_sizes`: the sizes of the pipeline that the world has room
    for (`layout_rules.pipeline_sizes`), so that a remedy offers no other; None where no world is known. Where there is
    a choice, a remedy offers what `accepts`, the caller's own judgement of the changed settings, agrees to.
    """
    judge = _Judge(settings, names, pp_sizes)
    return [
        Problem(names.get(one.field, one.field), getattr(settings, one.field), one.rule, _remedy(judge, one, accepts))
        for one in judge.broken
    ]


def broken_rules(settings: StageSettings) -> frozenset[tuple[str, str]]:
    """The rules that the settings break, as (field, kind): to see whether a change would break one more."""
    return _Judge(settings, FIELD_NAMES, None).keys


@dataclass(frozen=True)
class _Broken:
    """A broken rule about `field`, and the fields of which one, changed alone, may mend it."""

    field: str
    kind: Literal["value", "together", "sum"]
    rule: str
    fixes: tuple[str, ...]


class _Judge:
    """Judges values first, then contradictions, and sums only where both are sound."""

    def __init__(self, settings: StageSettings, names: Mapping[str, str], pp_sizes: Collection[int] | None) -> None:
        self.settings = settings
        self.names = names
        self.pp_sizes = pp_sizes
        first = [*self._values(), *self._needs_ranks(), *self._layout_reads(), *self._clashes()]
        self.broken = first or list(self._sums())
        self.keys = frozenset((one.field, one.kind) for one in self.broken)

    def show(self, field: str) -> str:
        return f"{self.names.get(field, field)}={getattr(self.settings, field)!r}"

    def changed(self, **changes: Any) -> "_Judge":
        return _Judge(replace(self.settings, **changes), self.names, self.pp_sizes)

    def _values(self) -> Iterator[_Broken]:
        limits = {"num_layers": 1, "pp": 1, "vpp": 1, "split_rank": 1, "first_layers": 0, "last_layers": 0}
        for field, least in limits.items():
            value = getattr(self.settings, field)
            if not is_whole(value, least) and (value is not None or field not in DEFAULTS):
                yield _Broken(field, "value", f"must be a whole number, at least {least}", (field,))

    def _needs_ranks(self) -> Iterator[_Broken]:
        """Rules that speak of several ranks, where there are too few."""
        s = self.settings
        if not is_whole(s.pp, 1):
            return
        if s.pp == 1 and is_whole(s.vpp, 2):
            rule = f"virtual stages divide the stages of a pipeline, and {self.show('pp')} has none"
            yield _Broken("vpp", "value", rule, ("vpp", "pp"))
        for field in ("standalone_embedding", "first_layers", "last_layers"):
            if s.pp == 1 and s.asks_for(field) and (field == "standalone_embedding" or is_whole(getattr(s, field), 0)):
                yield _Broken(field, "value", f"sets ranks apart, but {self.show('pp')} is one rank", (field, "pp"))
        low = 2 if s.standalone_embedding else 1
        if s.split_rank is not None and is_whole(s.split_rank, 1) and not low <= s.split_rank < s.pp:
            given = self.show("pp") + (f" and {self.show('standalone_embedding')}" if s.standalone_embedding else "")
            valid = f"must be {low} to {s.pp - 1}" if low < s.pp else f"needs {low + 1} ranks or more"
            rule = f"{valid} with {given}, so that encoder and decoder have a rank each"
            yield _Broken("split_rank", "value", rule, ("split_rank", "pp"))

    def _layout_reads(self) -> Iterator[_Broken]:
        try:
            layout_counts(self.settings.layout if self.settings.layout is not None else [0])
        except LayoutError as error:
            yield _Broken("layout", "value", str(error), ("layout",))

    def _clashes(self) -> Iterator[_Broken]:
        for field, excluders in EXCLUDED_BY.items():
            found = [other for other in excluders if self.settings.asks_for(other)]
            if found and self.settings.asks_for(field):
                others = " and ".join(self.show(other) for other in found)
                yield _Broken(field, "together", f"cannot be combined with {others}", (field, *found))

    def _sums(self) -> Iterator[_Broken]:
        s = self.settings
        if s.layout is not None:
            yield from self._layout_sums(layout_counts(s.layout))
        elif s.split_rank is not None:
            yield from self._split_sums(s.split_rank)
        elif s.count_embedding or s.count_loss:
            yield from self._counted_sums()
        else:
            yield from self._rank_sums()

    def _layout_sums(self, counts: Sequence[int]) -> Iterator[_Broken]:
        s, stages = self.settings, len(counts)
        if stages % s.pp or (s.pp == 1 and stages > 1):
            rule = f"has {stages} stages, " + (
                f"not a multiple of {self.show('pp')}" if s.pp > 1 else f"but {self.show('pp')} has one"
            )
            yield _Broken("layout", "sum", rule, ("pp", "layout"))
        elif s.vpp is not None and stages != s.pp * s.vpp:
            rule = (
                f"{self.show('layout')} has {stages} stages, that is {stages // s.pp} on each rank of {self.show('pp')}"
            )
            yield _Broken("vpp", "sum", rule, ("vpp", "pp", "layout"))
        if sum(counts) != s.num_layers:
            rule = f"{self.show('layout')} places {sum(counts)}"
            yield _Broken("num_layers", "sum", rule, ("num_layers", "layout"))

    def _split_sums(self, split: int) -> Iterator[_Broken]:
        s = self.settings
        sides = {"encoder": split - s.standalone_embedding, "decoder": s.pp - split}
        bad = [f"the {ranks} ranks of the {side}" for side, ranks in sides.items() if s.num_layers % ranks]
        if bad:
            rule = f"does not divide over {' nor over '.join(bad)} ({self.show('pp')}, {self.show('split_rank')})"
            yield _Broken("num_layers", "sum", rule, ("num_layers", "split_rank", "pp"))

    def _counted_sums(self) -> Iterator[_Broken]:
        s = self.settings
        counted = [field for field in ("count_embedding", "count_loss") if s.asks_for(field)]
        total = s.num_layers + len(counted)
        if total % (s.pp * (s.vpp or 1)):
            rule = (
                f"with {' and '.join(self.show(field) for field in counted)} it counts as {total}, "
                f"which does not divide over {self._stages(s.pp)}"
            )
            yield _Broken("num_layers", "sum", rule, ("num_layers", "pp", "vpp", *counted))

    def _rank_sums(self) -> Iterator[_Broken]:
        """Plain division, or of what the first and last rank leave over."""
        s, vpp = self.settings, self.settings.vpp or 1
        ends = [field for field in ("first_layers", "last_layers") if s.asks_for(field)]
        for field in ends:
            if getattr(s, field) % vpp:
                rule = f"does not divide over the chunks of a rank, {self.show('vpp')}"
                yield _Broken(field, "sum", rule, (field, "vpp"))
        apart = [*ends, *(["standalone_embedding"] if s.standalone_embedding else [])]
        rest, ranks = s.num_layers - sum(getattr(s, field) for field in ends), s.pp - len(apart)
        if rest == 0 if ranks == 0 else rest > 0 and rest % (ranks * vpp) == 0:
            return
        taken = f"with {' and '.join(self.show(field) for field in apart)} it leaves {rest}, which " if apart else ""
        if ranks == 0:
            rule = f"{taken}no other rank is there to hold"
        elif rest < ranks * vpp:
            rule = f"{taken}{'is ' if taken else ''}fewer than {self._stages(ranks)}: a stage would be left empty"
        else:
            rule = f"{taken}does not divide over {self._stages(ranks)}: {rest % (ranks * vpp)} would be left over"
        yield _Broken("num_layers", "sum", rule, ("num_layers", *ends, "pp", "vpp", "layout"))

    def _stages(self, ranks: int) -> str:
        """`the 8 stages of pp=4 x vpp=2`, as the rule says it."""
        s, vpp = self.settings, self.settings.vpp or 1
        sizes = self.show("pp") + (f" x {self.show('vpp')}" if vpp > 1 else "")
        return f"the {ranks * vpp} {'stages' if ranks == s.pp else 'other stages'} of {sizes}"


def _remedy(judge: _Judge, one: _Broken, accepts: Accepts) -> str:
    """Single changes after which no rule is broken; failing that, no rule but those that are reported as well."""
    others = judge.keys - {(one.field, one.kind)}
    for allowed, agrees in ((frozenset[Any](), accepts), (others, accepts), (others, anything)):
        found = {field: _working(judge, one, field, allowed, agrees) for field in one.fixes if field in judge.names}
        texts = [told(judge.names[field], values) for field, values in found.items() if values]
        if texts:
            return ", or ".join(texts)
    return _plain_remedy(judge)


def _working(judge: _Judge, one: _Broken, field: str, allowed: frozenset[Any], accepts: Accepts) -> list[Any]:
    """The nearest few values of `field` that leave only the `allowed` rules broken."""
    wanted = 2 if field == "num_layers" else 3
    found: list[Any] = []
    for value in _candidates(judge, field, one.kind):
        changed = judge.changed(**{field: value})
        if len(found) < wanted and changed.keys <= allowed and accepts(changed.settings):
            found.append(value)
        if len(found) == wanted or (found and found[-1] == number_meant(getattr(judge.settings, field))):  # 4 for "4"
            break
    return found


def _plain_remedy(judge: _Judge) -> str:
    """Back to plain division, with other numbers where they are needed: it always works."""
    s = judge.settings
    rules = [judge.names.get(field, field) for field in DEFAULTS if field != "vpp" and s.asks_for(field)]
    parts = [f"leave {' and '.join(rules)} unset"] if rules else []
    pp = s.pp if is_whole(s.pp, 1) else min(judge.pp_sizes or [1])
    chunks = 1 if s.vpp is None or pp == 1 or not is_whole(s.vpp, 1) else s.vpp
    layers = s.num_layers if is_whole(s.num_layers, 1) else pp * chunks
    below = layers // (pp * chunks) * pp * chunks
    near = [layers] if below == layers else [number for number in (below, below + pp * chunks) if number]
    for field, values in (("pp", [pp]), ("vpp", [chunks]), ("num_layers", near)):
        if getattr(s, field) not in (None if field == "vpp" else values[0], *values):
            parts.append(told(judge.names.get(field, field), values))
    return ", and ".join(parts)


def _candidates(judge: _Judge, field: str, kind: str) -> Iterator[Any]:
    """Values worth trying for one field, the nearest first."""
    settings = judge.settings
    given, layers = getattr(settings, field), settings.num_layers
    if field == "layout":
        if isinstance(given, str):
            yield without_prediction(given)
        if is_whole(layers, 1) and is_whole(settings.pp, 1):
            chunks = settings.vpp if settings.vpp is not None and is_whole(settings.vpp, 1) else 1
            yield example_layout(layers, settings.pp * chunks)
    elif kind != "together" and field not in ("standalone_embedding", "count_embedding", "count_loss"):
        if field == "pp" and judge.pp_sizes is not None:
            near = number_meant(given)
            yield from sorted(judge.pp_sizes, key=lambda size: abs(size - near))
        else:
            yield from _numbers(settings, field)
    if field == "vpp" and kind == "together":
        yield 1
    elif field in DEFAULTS and field != "vpp" and given is not None:
        yield DEFAULTS[field]


def _numbers(settings: StageSettings, field: str) -> Iterator[int]:
    given = getattr(settings, field)
    layers = settings.num_layers if is_whole(settings.num_layers, 1) else REACH
    placed = _placed(settings)
    if placed and field in ("num_layers", "pp", "vpp"):
        low, high = (sum(placed), sum(placed)) if field == "num_layers" else (1, len(placed))
    elif field == "num_layers":
        low, high = 1, layers + REACH
    elif field == "split_rank":
        low, high = 1, settings.pp - 1 if is_whole(settings.pp, 2) else 1
    else:
        low, high = (0, layers) if field.endswith("layers") else (1, 2 * layers + 2)
    if (given is None and field in DEFAULTS) or high < low:
        return
    near = min(max(number_meant(given), low), high)
    for distance in range(REACH + 1):
        for value in sorted({near - distance, near + distance}):
            if low <= value <= high:
                yield value


def _placed(settings: StageSettings) -> tuple[int, ...]:
    """Layers of each stage of a layout that can be read, else nothing."""
    try:
        return () if settings.layout is None else layout_counts(settings.layout)
    except LayoutError:
        return ()
