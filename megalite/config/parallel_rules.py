"""Rules that join the layout with the world, the batch and the sizes of the model."""

from collections.abc import Iterator
from dataclasses import replace

from megalite.config.derive import derive_micro_batch_size, derive_schedule
from megalite.config.exchange import drops_probabilities, exchange_of, exchanges_heads, local_heads
from megalite.config.hints import problems_of
from megalite.config.layout import AXES, STAGE_NAMES, dense_ranks, expert_ranks, has_experts, layout_of, stage_settings
from megalite.config.rule import Case, Row
from megalite.config.schedule_rules import SCHEDULE_TRAITS, ScheduleRequest, schedule_flaws
from megalite.config.schema import Config
from megalite.config.step_plan import ramp_flaw, ramp_sizes
from megalite.errors.problems import UserError
from megalite.layout.ranks import EXPERT_NAME, ParallelLayout, pipeline_strides
from megalite.layout.stages import stage_counts

BLOCK = 16  # tokens: the shortest piece of a ring's sequence that fills the rows of a matrix unit


def checked_layout(case: Case) -> ParallelLayout:
    """The layout that the config asks for, or a UserError with everything that is wrong with it."""
    if problems := problems_of(case, LAYOUT_RULES):
        raise UserError(problems)
    return layout_of(case.config, case.world_size, experts=case.experts)


def schedule_request(config: Config, world_size: int) -> ScheduleRequest:
    """What the config asks of a schedule. pp microbatches, which suit any, where batch or layout do not fit."""
    axes, schedule, case = config.parallel, derive_schedule(config.parallel), Case(config, world_size)
    if not case.fills_the_world or config.train.global_batch_size % case.batch_unit:
        group_size = None if SCHEDULE_TRAITS[schedule].chunked else axes.microbatch_group_size
        return ScheduleRequest(schedule, axes.pp, axes.pp, axes.vpp, group_size)
    sequences = derive_micro_batch_size(config, world_size) * world_size // dense_ranks(config)
    microbatches = config.train.global_batch_size // sequences
    return ScheduleRequest(schedule, axes.pp, microbatches, axes.vpp, axes.microbatch_group_size)


def order_places_the_axes(case: Case) -> Iterator[Row]:
    """An axis that the order leaves out has no place unless its size is 1."""
    named = case.config.parallel.order.split("-")
    misnamed = sorted(named) != sorted({*named} & {*AXES})
    yield misnamed, "order", f"must name axes of {', '.join(AXES)}, in lower case and none twice"
    for axis in AXES if not misnamed else ():
        size = max(case.sizes[axis], case.sizes[EXPERT_NAME.get(axis, axis)])
        yield axis not in named and size > 1, "order", f"has no place for {axis}, which has size {size}"


def sizes_fill_the_world(case: Case) -> Iterator[Row]:
    experts = has_experts(case.config, experts=case.experts) and case.world_size % expert_ranks(case.config)
    yield not case.fills_the_world, "world_size tp cp pp", "not a multiple of {1} x {2} x {3}"
    yield experts, "world_size etp ep pp", "not a multiple of {1} x {2} x {3}, the ranks of one set of experts"


def pipelines_agree(case: Case) -> Iterator[Row]:
    """Activations flow along one pipeline, so dense layers and experts must agree who is next."""
    axes = case.config.parallel
    wrong = any(row[0] for rule in (order_places_the_axes, sizes_fill_the_world) for row in rule(case))
    virtual = "virtual stages divide the stages of a pipeline, and {1} has none"
    yield axes.vpp > 1 and axes.pp == 1, "vpp pp", virtual
    if axes.pp > 1 and has_experts(case.config, experts=case.experts) and not wrong:
        dense, expert = pipeline_strides(axes.order, case.sizes)
        rule = f"neighbouring stages are {dense} ranks apart for dense layers, {expert} for experts"
        yield dense != expert, "order", rule


def stages_hold_all_layers(case: Case) -> Iterator[Row]:
    """Settings that place the same layers clash; the others must place each layer once."""
    settings, names = stage_settings(case.config, case.split_rank), {**STAGE_NAMES, "split_rank": "split_rank"}
    for clashing, fields in settings.clashes.items():
        others = [names[other] for other in fields]
        rule = f"cannot be combined with {' and '.join(map(case.show, others))}"
        yield True, " ".join((names[clashing], *others)), rule
    if settings.clashes or (settings.vpp > 1 and settings.pp == 1):  # another rule says so
        return
    try:
        stage_counts(settings)
    except ValueError as error:
        asked = [names[name] for name in settings.asked]
        refused = "model.num_layers" if settings.layout is None else "parallel.pipeline_layout"
        shown = dict.fromkeys(("parallel.pp", *(name for name in asked if name != "parallel.pipeline_layout")))
        tried = dict.fromkeys((refused, "model.num_layers", *asked, "parallel.pp", "parallel.vpp"))
        yield True, " ".join(tried), f"{error} ({', '.join(map(case.show, shown))})"


def batches_suit_the_schedule(case: Case) -> Iterator[Row]:
    axes, train, unit = case.config.parallel, case.config.train, case.batch_unit
    uneven = case.fills_the_world and train.global_batch_size % unit
    rule = f"not a multiple of {unit}, a micro-batch for each data-parallel rank"
    yield uneven, f"global_batch_size micro_batch_size world_size {unit}", rule
    for name, rule in schedule_flaws(schedule_request(case.config, case.world_size)):
        yield True, " ".join(dict.fromkeys((name, "parallel.schedule", "parallel.vpp"))), rule
    late = train.compile and SCHEDULE_TRAITS[derive_schedule(axes)].splitting
    yield late, "compile parallel.schedule", "compiled blocks cannot put their weight gradients off, as {1} does"


def batches_grow_to_the_full_size(case: Case) -> Iterator[Row]:
    if case.config.train.batch_ramp is not None:
        yield from (
            (True, "batch_ramp", rule) for rule in (ramp_flaw(case.config.train) or _uneven_ramp(case),) if rule
        )


def _uneven_ramp(case: Case) -> str | None:
    """The rule that a batch smaller than the full one breaks. What the full one breaks is for other rules to say."""
    sizes, unit = ramp_sizes(case.config.train), case.batch_unit
    request = schedule_request(case.config, case.world_size)
    if not case.fills_the_world or sizes[-1] % unit or [*schedule_flaws(request)]:
        return None
    if uneven := [size for size in sizes[:2] if size % unit]:  # two tell for all, at equal distances
        return f"its batches of {uneven[0]} sequences are not a multiple of the micro-batches of all ranks, {unit}"
    sequences = sizes[-1] // request.microbatches
    for size in sizes if SCHEDULE_TRAITS[request.schedule].chunked else ():
        for _, rule in schedule_flaws(replace(request, microbatches=size // sequences)):
            return f"its batches of {size} sequences make {size // sequences} microbatches: {rule}"
    return None


def layers_split_over_tensor_parallel_ranks(case: Case) -> Iterator[Row]:
    model, axes = case.derived.model, case.derived.parallel
    tp, heads, groups, width = axes.tp, model.num_attention_heads, model.num_key_value_heads, model.ffn_hidden_size
    shared = groups == heads or heads % groups or groups % tp == 0 or tp % groups == 0
    has_mlp = len(model.expert_layers) < model.num_layers
    small = "below {1}: a small vocabulary, padded to it, might leave a rank without rows"
    yield tp == 1 and axes.sequence_parallel, "sequence_parallel tp", "there is nothing to split it over with {1}"
    yield heads % tp, "num_attention_heads tp", "does not split over {1}"
    yield not shared, "num_key_value_heads tp num_attention_heads", "neither a multiple nor a divisor of {1}"
    yield has_mlp and width % tp, "model.ffn_hidden_size tp", "does not split over {1}"
    yield model.vocab_multiple < tp, "vocab_multiple tp", small


def sequences_divide(case: Case) -> Iterator[Row]:
    axes = case.derived.parallel
    parts = axes.tp if axes.sequence_parallel else 1
    pieces = parts if axes.cp == 1 else 2 * axes.cp * parts
    rule = f"not a multiple of {pieces}, its pieces with {{1}} and {{2}}"
    yield case.config.train.seq_length % pieces, f"seq_length cp tp sequence_parallel {pieces}", rule


def instances_split_the_replicas(case: Case) -> Iterator[Row]:
    """The optimizer's state has instances over dp x cp; that of the experts, over edp."""
    optimizer, sizes = case.config.optimizer, case.sizes
    replicas, expert_replicas = sizes["dp"] * sizes["cp"], sizes["edp"]
    if not optimizer.zero or not case.fills_the_world:
        return
    rule = f"does not divide dp x cp = {replicas} ({case.show('parallel.tp')}, {case.show('parallel.pp')})"
    yield replicas % optimizer.instances, f"instances {replicas}", rule
    if case.config.model.moe.num_experts and case.world_size % expert_ranks(case.config) == 0:
        rule = f"does not divide edp = {expert_replicas}, the ranks that hold the same experts"
        yield expert_replicas % optimizer.instances, f"instances {expert_replicas}", rule


def heads_suit_the_exchange(case: Case) -> Iterator[Row]:
    config, axes, cp, size = (
        case.config,
        case.config.parallel,
        case.config.parallel.cp,
        case.config.parallel.cp_alltoall,
    )
    heads, groups = local_heads(config)
    have = f"the {heads} query and {groups} key-value heads of a rank"
    if cp == 1:  # other rules say that the settings have no effect
        return
    both, sizes = axes.cp_comm == "alltoall+ring", [some for some in range(2, cp) if cp % some == 0]
    yield size and not both, "cp_alltoall cp_comm", "has no effect with {1}"
    whole = axes.cp_comm == "alltoall" and not exchanges_heads(config, cp)
    yield whole, "cp_comm cp", f"{have} do not divide over {{1}}"
    yield both and not sizes, "cp_comm cp", "{1} is no product of two sizes above 1"
    yield (
        both and sizes and size not in (None, *sizes),
        "cp_alltoall cp cp_comm",
        f"must divide {{1}}, between 1 and {cp}",
    )
    if both and sizes and size in (None, *sizes):
        alltoall = exchange_of(config).alltoall
        names = "cp_alltoall cp_comm" if size else "cp_comm cp"
        rule = f"does not divide {have}" if size else f"between 1 and {{1}} there is no divisor that divides {have}"
        yield alltoall == 1 or not exchanges_heads(config, alltoall), names, rule


def sequences_and_dropout_suit_the_exchange(case: Case) -> Iterator[Row]:
    """A ring's pieces fill a block, and dropout of probabilities needs whole rows of them."""
    config, axes, length = case.config, case.config.parallel, case.config.train.seq_length
    if axes.cp == 1:
        return
    ring, dropout = exchange_of(config).ring, drops_probabilities(config)
    tokens = length // (2 * ring)
    short = ring > 1 and length % (2 * ring) == 0 and tokens < BLOCK
    unsplit = ring == 1 and axes.cp_comm == "auto" and not exchanges_heads(config, axes.cp)
    rule = f"leaves {{1}} pieces of {tokens} tokens, shorter than a block of {BLOCK}"
    yield short, f"seq_length cp cp_comm {2 * ring * BLOCK}", rule
    rule = "with {1} no rank has whole rows of probabilities to drop from"
    yield dropout and ring > 1, "attention_dropout cp_comm cp", rule
    rule = "needs an exchange of heads, and those of a rank do not divide over {1}"
    yield dropout and unsplit, "attention_dropout cp", rule


LAYOUT_RULES = (order_places_the_axes, sizes_fill_the_world, pipelines_agree)
STAGE_RULES = (stages_hold_all_layers,)
SCHEDULE_RULES = (batches_suit_the_schedule,)
CONTEXT_RULES = (sequences_divide, heads_suit_the_exchange, sequences_and_dropout_suit_the_exchange)
PARALLEL_RULES = (
    *(*LAYOUT_RULES, *STAGE_RULES, *SCHEDULE_RULES, batches_grow_to_the_full_size),
    *(layers_split_over_tensor_parallel_ranks, instances_split_the_replicas, *CONTEXT_RULES),
)
