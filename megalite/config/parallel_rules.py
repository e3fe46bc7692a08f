"""Rules that join the layout with the world, the batch and the sizes of the model."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from megalite.config.derive import schedule_request
from megalite.config.layout import (
    AXES,
    STAGE_NAMES,
    drops_probabilities,
    exchange_of,
    exchanges_heads,
    layout_of,
    least_world,
    local_heads,
    stage_settings,
)
from megalite.config.rule import Case, Found, Rule, problems_of, routes
from megalite.config.schedule_rules import schedule_flaws
from megalite.config.step_plan import batch_ramp, ramp_flaw
from megalite.errors.problems import refuse
from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, EXPERT_NAME, ParallelLayout, strides_of
from megalite.layout.stages import stage_counts

BLOCK = 16  # tokens: the shortest piece of a ring's sequence that fills the rows of a matrix unit


def checked_layout(case: Case) -> ParallelLayout:
    """The layout that the config asks for, or a UserError with everything that is wrong with it."""
    refuse(problems_of(case, LAYOUT_RULES))
    return layout_of(case.config, case.world_size)


def axes_have_places(case: Case) -> Iterator[Found]:
    """Activations flow along one pipeline, so dense layers and experts must agree which stages are neighbours."""
    axes, sizes, named = case.config.parallel, case.sizes, case.config.parallel.order.split("-")
    yield axes.vpp > 1 and axes.pp == 1, "vpp pp", "virtual stages divide the stages of a pipeline, and {1} has none"
    if sorted(named) != sorted({*named} & {*AXES}):
        yield True, "order", f"must name axes of {', '.join(AXES)}, in lower case and none twice"
        return
    large = [axis for axis in AXES if max(sizes[axis], sizes[EXPERT_NAME.get(axis, axis)]) > 1]
    missing = [axis for axis in large if axis not in named]
    yield missing, "order", f"has no place for {', '.join(missing)} of sizes above 1"
    if axes.pp > 1 and routes(case) and case.world_size % least_world(case.config) == 0 and not missing:
        dense, expert = (strides_of(axes.order, sizes, known)["pp"] for known in (DENSE_AXES, EXPERT_AXES))
        rule = f"neighbouring stages are {dense} ranks apart for dense layers, {expert} for experts"
        yield dense != expert, "order", rule


def stages_hold_all_layers(case: Case) -> Iterator[Found]:
    """Settings that place the same layers clash; the others must place each layer once."""
    settings, names = stage_settings(case.config, case.split_rank), {**STAGE_NAMES, "split_rank": "split_rank"}
    for clashing, others in settings.clashes.items():
        shown = " and ".join(case.show(names[other]) for other in others)
        yield True, " ".join(names[one] for one in (clashing, *others)), f"cannot be combined with {shown}"
    if settings.clashes or (settings.vpp > 1 and settings.pp == 1):  # another rule says so
        return
    try:
        stage_counts(settings)
    except ValueError as error:
        refused = "model.num_layers" if settings.layout is None else "parallel.pipeline_layout"
        asked = [names[name] for name in settings.asked]
        shown = ", ".join(case.show(name) for name in dict.fromkeys(("parallel.pp", *asked)) if name != refused)
        tried = dict.fromkeys((refused, "model.num_layers", *asked, "parallel.pp", "parallel.vpp"))
        yield True, " ".join(tried), f"{error} ({shown})"


def batches_suit_the_schedule(case: Case) -> Iterator[Found]:
    unit = case.batch_unit
    uneven = case.fills_the_world and case.config.train.global_batch_size % unit
    rule = f"not a multiple of {unit}, a micro-batch for each data-parallel rank"
    yield uneven, f"global_batch_size micro_batch_size world_size {unit}", rule
    for name, rule in schedule_flaws(schedule_request(case.config, case.world_size)):
        yield True, " ".join(dict.fromkeys((name, "parallel.schedule", "parallel.vpp", "parallel.pp"))), rule


def batches_grow_to_the_full_size(case: Case) -> Iterator[Found]:
    """All batches of a ramp suit ranks and schedule. Other rules judge the full one."""
    train, unit, request = case.config.train, case.batch_unit, schedule_request(case.config, case.world_size)
    sizes, flaw = batch_ramp(train).sizes, ramp_flaw(train)
    yield flaw, "batch_ramp", str(flaw)
    if case.fills_the_world and sizes[-1] % unit == 0 and not [*schedule_flaws(request)]:
        uneven = next((size for size in sizes if size % unit), 0)
        yield uneven, "batch_ramp", f"has batches of {uneven} sequences, and all ranks take multiples of {unit}"
        ramps = () if uneven else (size * request.microbatches // sizes[-1] for size in sizes[:-1])
        flaws = ((many, *flaw) for many in ramps for flaw in schedule_flaws(replace(request, microbatches=many)))
        for many, _, rule in islice(flaws, 1):
            yield True, "batch_ramp", f"has batches of {many} microbatches: {rule}"


def ranks_hold_equal_shares(case: Case) -> Iterator[Found]:
    """Layers are cut over tp, key-value heads cut or copied; the optimizer's instances divide its replicas."""
    model, tp, sizes = case.derived.model, case.config.parallel.tp, case.sizes
    heads, groups, instances = model.num_attention_heads, model.num_key_value_heads, case.config.optimizer.instances
    apart = heads % groups == 0 and groups != heads and groups % tp and tp % groups
    yield apart, "num_key_value_heads tp num_attention_heads", "neither a multiple nor a divisor of {1}"
    mlp = len(model.expert_layers) < model.num_layers
    yield mlp and model.ffn_hidden_size % tp, "model.ffn_hidden_size tp", "not a multiple of {1}"
    replicas = {"dp x cp": sizes["dp"] * sizes["cp"]} if case.config.optimizer.zero and case.fills_the_world else {}
    if replicas and routes(case) and case.world_size % least_world(case.config) == 0:
        replicas["edp"] = sizes["edp"]
    for name, ranks in replicas.items():
        yield ranks % instances, f"instances tp pp {ranks}", f"does not divide {name} = {ranks}"


def context_ranks_can_exchange(case: Case) -> Iterator[Found]:
    """Pieces of a sequence are equal, a ring's fill a block, heads divide over ranks that swap them, and dropout needs
    whole rows."""
    config, axes, exchange = case.config, case.derived.parallel, exchange_of(case.config)
    (heads, groups), cp, kind, size = local_heads(config), axes.cp, axes.cp_comm, axes.cp_alltoall
    pieces = (axes.tp if axes.sequence_parallel else 1) * (1 if cp == 1 else 2 * cp)
    rule = f"not a multiple of {pieces}, its pieces with {{1}} and {{2}}"
    yield config.train.seq_length % pieces, f"seq_length cp tp sequence_parallel {pieces}", rule
    if cp == 1:  # other rules say that the settings have no effect
        return
    have, both = f"the {heads} query and {groups} key-value heads of a rank", kind == "alltoall+ring"
    drops, divides = drops_probabilities(config), exchanges_heads(config, exchange.alltoall)
    product = 1 < exchange.alltoall < cp and cp % exchange.alltoall == 0
    yield size and not both, "cp_alltoall cp_comm", "has no effect with {1}"
    yield kind == "alltoall" and not divides, "cp_comm cp", f"{have} do not divide over {{1}}"
    rule = f"{{1}} must be a product of two sizes above 1, over the first of which divide {have}"
    yield both and not (product and divides), "cp_alltoall cp cp_comm" if size else "cp_comm cp", rule
    tokens, rest = divmod(config.train.seq_length, 2 * exchange.ring)
    rule = f"leaves {{1}} pieces of {tokens} tokens, shorter than a block of {BLOCK}"
    yield exchange.ring > 1 and not rest and tokens < BLOCK, f"seq_length cp cp_comm {2 * exchange.ring * BLOCK}", rule
    rule = "with {1} no rank has whole rows of probabilities to drop from"
    yield drops and exchange.ring > 1, "attention_dropout cp_comm cp", rule
    rule = f"needs an exchange of heads, and {have} do not divide over {{1}}"
    yield drops and kind == "auto" and not divides, "attention_dropout cp", rule


LAYOUT_RULES: tuple[Rule, ...] = (
    axes_have_places,
    ("world_size", "not a multiple of", "tp cp pp"),
    ("world_size", "not a multiple of", "etp ep pp", routes),
)
EXPERT_RULES: tuple[Rule, ...] = (("num_experts", "not a multiple of", "ep"),)
STAGE_RULES: tuple[Rule, ...] = (stages_hold_all_layers,)
SCHEDULE_RULES: tuple[Rule, ...] = (batches_suit_the_schedule,)
PARALLEL_RULES: tuple[Rule, ...] = (
    *(*LAYOUT_RULES, *EXPERT_RULES, *STAGE_RULES, *SCHEDULE_RULES, batches_grow_to_the_full_size),
    ("num_attention_heads", "not a multiple of", "tp"),
    ("vocab_multiple", "below", "tp"),  # a small vocabulary, padded to it, might leave a rank without rows
    *(ranks_hold_equal_shares, context_ranks_can_exchange),
)
