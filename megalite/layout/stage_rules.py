"""Which settings of a pipeline's stages place every layer once.

A rule that drops a layer or leaves a stage empty unasked is the classic silent mistake of pipelines, so every setting
is judged before any stage is built.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from megalite.layout.flaws import Flaw, Show, is_whole, shown_by
from megalite.layout.stage_string import Layout, LayoutError, layout_counts


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

    def asked(self, *names: str) -> list[str]:
        return [name for name in names if self.asks_for(name)]


DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(StageSettings) if field.name not in ("num_layers", "pp")
}
LEAST = {"num_layers": 1, "pp": 1, "vpp": 1, "split_rank": 1, "first_layers": 0, "last_layers": 0}
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


def stage_flaws(settings: StageSettings, show: Show | None = None) -> list[Flaw]:
    """Everything that is wrong with the settings: values and contradictions; sums only where those are sound."""
    show = show or shown_by(settings)
    flaws = [flaw for rule in FIRST_RULES for flaw in rule(settings, show)]
    return flaws or [flaw for rule in SUM_RULES for flaw in rule(settings, show)]


def values_are_sizes(s: StageSettings, show: Show) -> Iterator[Flaw]:
    for field, least in LEAST.items():
        value = getattr(s, field)
        if not is_whole(value, least) and (value is not None or field not in DEFAULTS):
            yield Flaw(field, "value", f"must be a whole number, at least {least}", (field,))


def ends_need_ranks(s: StageSettings, show: Show) -> Iterator[Flaw]:
    """Rules that speak of several ranks, where there are too few."""
    if not is_whole(s.pp, 1):
        return
    if s.pp == 1 and is_whole(s.vpp, 2):
        rule = f"virtual stages divide the stages of a pipeline, and {show('pp')} has none"
        yield Flaw("vpp", "pipeline", rule, ("vpp", "pp"))
    for field in s.asked("standalone_embedding", "first_layers", "last_layers") if s.pp == 1 else ():
        yield Flaw(field, "pipeline", f"sets ranks apart, but {show('pp')} is one rank", (field, "pp"))
    low = 2 if s.standalone_embedding else 1
    if s.split_rank is not None and is_whole(s.split_rank, 1) and not low <= s.split_rank < s.pp:
        given = show("pp") + (f" and {show('standalone_embedding')}" if s.standalone_embedding else "")
        valid = f"must be {low} to {s.pp - 1}" if low < s.pp else f"needs {low + 1} ranks or more"
        rule = f"{valid} with {given}, so that encoder and decoder have a rank each"
        yield Flaw("split_rank", "pipeline", rule, ("split_rank", "pp"))


def layout_can_be_read(s: StageSettings, show: Show) -> Iterator[Flaw]:
    try:
        layout_counts(s.layout if s.layout is not None else [0])
    except LayoutError as error:
        yield Flaw("layout", "value", str(error), ("layout",))


def rules_do_not_clash(s: StageSettings, show: Show) -> Iterator[Flaw]:
    for field in s.asked(*EXCLUDED_BY):
        if others := s.asked(*EXCLUDED_BY[field]):
            rule = f"cannot be combined with {' and '.join(map(show, others))}"
            yield Flaw(field, "together", rule, (field, *others))


def layout_places_all(s: StageSettings, show: Show) -> Iterator[Flaw]:
    if s.layout is None:
        return
    counts = layout_counts(s.layout)
    stages = len(counts)
    if stages % s.pp or (s.pp == 1 and stages > 1):
        ranks = f"not a multiple of {show('pp')}" if s.pp > 1 else f"but {show('pp')} has one"
        yield Flaw("layout", "sum", f"has {stages} stages, {ranks}", ("pp", "layout"))
    elif s.vpp is not None and stages != s.pp * s.vpp:
        rule = f"{show('layout')} has {stages} stages, that is {stages // s.pp} on each rank of {show('pp')}"
        yield Flaw("vpp", "sum", rule, ("vpp", "pp", "layout"))
    if sum(counts) != s.num_layers:
        yield Flaw("num_layers", "sum", f"{show('layout')} places {sum(counts)}", ("num_layers", "layout"))


def encoder_and_decoder_divide(s: StageSettings, show: Show) -> Iterator[Flaw]:
    if s.split_rank is None or s.layout is not None:
        return
    sides = {"encoder": s.split_rank - s.standalone_embedding, "decoder": s.pp - s.split_rank}
    if bad := [f"the {ranks} ranks of the {side}" for side, ranks in sides.items() if s.num_layers % ranks]:
        rule = f"does not divide over {' nor over '.join(bad)} ({show('pp')}, {show('split_rank')})"
        yield Flaw("num_layers", "sum", rule, ("num_layers", "split_rank", "pp"))


def counted_ends_divide(s: StageSettings, show: Show) -> Iterator[Flaw]:
    counted = s.asked("count_embedding", "count_loss")
    total = s.num_layers + len(counted)
    if counted and total % (s.pp * (s.vpp or 1)):
        told = f"with {' and '.join(map(show, counted))} it counts as {total}"
        rule = f"{told}, which does not divide over {_stages(s, s.pp, show)}"
        yield Flaw("num_layers", "sum", rule, ("num_layers", "pp", "vpp", *counted))


def layers_divide(s: StageSettings, show: Show) -> Iterator[Flaw]:
    """Plain division, or of what the first and last rank leave over."""
    if s.asked("layout", "split_rank", "count_embedding", "count_loss"):
        return
    vpp, ends = s.vpp or 1, s.asked("first_layers", "last_layers")
    for field in ends:
        if getattr(s, field) % vpp:
            yield Flaw(field, "sum", f"does not divide over the chunks of a rank, {show('vpp')}", (field, "vpp"))
    apart = [*ends, *s.asked("standalone_embedding")]
    rest, ranks = s.num_layers - sum(getattr(s, field) for field in ends), s.pp - len(apart)
    if rest == 0 if ranks == 0 else rest > 0 and rest % (ranks * vpp) == 0:
        return
    taken = f"with {' and '.join(map(show, apart))} it leaves {rest}, which " if apart else ""
    if ranks == 0:
        rule = f"{taken}no other rank is there to hold"
    elif rest < ranks * vpp:
        rule = f"{taken}{'is ' if taken else ''}fewer than {_stages(s, ranks, show)}: a stage would be left empty"
    else:
        rule = f"{taken}does not divide over {_stages(s, ranks, show)}: {rest % (ranks * vpp)} would be left over"
    yield Flaw("num_layers", "sum", rule, ("num_layers", *ends, "pp", "vpp", "layout"))


def _stages(s: StageSettings, ranks: int, show: Show) -> str:
    """`the 8 stages of pp=4 x vpp=2`, as the rule says it."""
    vpp = s.vpp or 1
    sizes = show("pp") + (f" x {show('vpp')}" if vpp > 1 else "")
    return f"the {ranks * vpp} {'stages' if ranks == s.pp else 'other stages'} of {sizes}"


FIRST_RULES = (values_are_sizes, ends_need_ranks, layout_can_be_read, rules_do_not_clash)
SUM_RULES = (layout_places_all, encoder_and_decoder_divide, counted_ends_divide, layers_divide)
