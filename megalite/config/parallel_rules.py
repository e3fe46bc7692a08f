"""The rules that join the layout with the world, the batch and the model's sizes; remedies.py says what a rule is."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from math import gcd, prod
from typing import Any

from megalite.config.bounds import LARGEST
from megalite.config.derive import derive_compile, derive_micro_batch_size, derive_model, derive_schedule
from megalite.config.layout import (
    AXES,
    STAGE_NAMES,
    axis_sizes,
    dense_ranks,
    has_experts,
    layout_of,
    least_world,
    stage_settings,
)
from megalite.config.remedies import Case, Flaw, problems_of, splits
from megalite.config.schedule_rules import SCHEDULE_TRAITS, ScheduleRequest, schedule_flaws
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS
from megalite.config.step_plan import ramp_flaw, ramp_sizes
from megalite.errors.problems import UserError
from megalite.errors.remedies import divisors, multiples, nearest_first
from megalite.layout.ranks import DEFAULT_ORDER, EXPERT_NAME, ParallelLayout, complete_order, pipeline_strides
from megalite.layout.stage_string import even_layout
from megalite.layout.stages import stage_counts

# --- what is asked, as numbers -------------------------------------------------------------------------------------


def checked_layout(case: Case) -> ParallelLayout:
    """The layout that the config asks for, or a UserError with everything that is wrong with it."""
    if problems := problems_of(case, LAYOUT_RULES):
        raise UserError(problems)
    return layout_of(case.config, case.world_size, experts=case.experts)


def _sizes(case: Case) -> dict[str, int]:
    return axis_sizes(case.config, case.world_size, experts=case.experts)


def _has_experts(case: Case) -> bool:
    return has_experts(case.config, experts=case.experts)


def schedule_request(config: Config, world_size: int) -> ScheduleRequest:
    """What the config asks of a schedule. pp microbatches, which suit any, where batch or layout do not fit."""
    axes, schedule, unit = config.parallel, derive_schedule(config.parallel), _unit(config, world_size)
    if unit is None or config.train.global_batch_size % unit:
        group_size = None if SCHEDULE_TRAITS[schedule].chunked else axes.microbatch_group_size
        return ScheduleRequest(schedule, axes.pp, axes.pp, axes.vpp, group_size)
    sequences = derive_micro_batch_size(config, world_size) * world_size // dense_ranks(config)
    microbatches = config.train.global_batch_size // sequences
    return ScheduleRequest(schedule, axes.pp, microbatches, axes.vpp, axes.microbatch_group_size)


def _unit(config: Config, world_size: int) -> int | None:
    """Sequences of which every batch is a multiple; None where the layout does not divide the world."""
    replicas, rest = divmod(world_size, dense_ranks(config))
    return None if rest else (config.train.micro_batch_size or 1) * replicas


# --- ranks ---------------------------------------------------------------------------------------------------------


def order_places_the_axes(case: Case) -> Iterator[Flaw]:
    """An axis that the order leaves out has no place unless its size is 1."""
    named, sizes = case.config.parallel.order.split("-"), _sizes(case)
    placed = [axis for axis in dict.fromkeys(map(str.lower, named)) if axis in AXES]
    order = "-".join(placed)
    fixes = {"parallel.order": [order, "-".join(complete_order(order)), DEFAULT_ORDER]}
    if sorted(named) != sorted(placed):
        rule = f"must name axes of {', '.join(AXES)}, in lower case and none twice"
        yield Flaw("parallel.order", rule, fixes)
        return
    for axis in (axis for axis in AXES if axis not in named):
        size = max(sizes[axis], sizes[EXPERT_NAME.get(axis, axis)])
        if size > 1:
            yield Flaw("parallel.order", f"has no place for {axis}, which has size {size}", fixes)


def virtual_stages_need_a_pipeline(case: Case) -> Iterator[Flaw]:
    if case.config.parallel.vpp > 1 and case.config.parallel.pp == 1:
        rule = "virtual stages divide the stages of a pipeline, and parallel.pp=1 has none"
        yield Flaw("parallel.vpp", rule, {"parallel.vpp": [1], "parallel.pp": divisors(case.world_size, 1)})


def sizes_fill_the_world(case: Case) -> Iterator[Flaw]:
    etp = "tp" if case.config.parallel.etp is None else "etp"
    products = [("tp", "cp", "pp", "")]
    if _has_experts(case):
        products.append((etp, "ep", "pp", ", the ranks of one set of experts"))
    for *axes, words in products:
        names = [f"parallel.{axis}" for axis in axes]
        sizes = {name: case.value(name) for name in names}
        if case.world_size % (ranks := prod(sizes.values())):
            fixes = {name: divisors(case.world_size, size) for name, size in sizes.items() if size > 1}
            fixes = {"world_size": multiples(least_world(case.config), case.world_size), **fixes}
            yield Flaw("world_size", f"not a multiple of {case.show(*names)} = {ranks}{words}", fixes)


def pipelines_agree(case: Case) -> Iterator[Flaw]:
    """Activations flow along one pipeline, so dense layers and experts must agree who is next."""
    axes, faulty = case.config.parallel, (*order_places_the_axes(case), *sizes_fill_the_world(case))
    if axes.pp == 1 or not _has_experts(case) or faulty:
        return
    dense, expert = pipeline_strides(axes.order, _sizes(case))
    if dense != expert:
        rule = f"neighbouring stages are {dense} ranks apart for dense layers, {expert} for experts"
        outermost = "-".join([*(axis for axis in axes.order.split("-") if axis != "pp"), "pp"])
        yield Flaw("parallel.order", rule, {"parallel.order": [outermost, DEFAULT_ORDER]})


# --- stages of a pipeline ------------------------------------------------------------------------------------------


def stages_hold_all_layers(case: Case) -> Iterator[Flaw]:
    """Settings that place the same layers clash; the others must place each layer once."""
    settings, names = stage_settings(case.config, case.split_rank), {**STAGE_NAMES, "split_rank": "split_rank"}
    for field, others in settings.clashes.items():
        rule = f"cannot be combined with {' and '.join(case.show(names[other]) for other in others)}"
        yield Flaw(names[field], rule, {names[each]: [_default(names[each])] for each in (field, *others)})
    if settings.clashes or (settings.vpp > 1 and settings.pp == 1):  # another rule says so
        return
    try:
        stage_counts(settings)
    except ValueError as error:
        asked = [names[field] for field in settings.asked]
        layers, stages = settings.num_layers, settings.pp * settings.vpp
        refused = "model.num_layers" if settings.layout is None else "parallel.pipeline_layout"
        near = {*range(max(1, layers - 20), layers + 20), *islice(multiples(stages, layers), 3)}
        fixes: dict[str, Any] = {"model.num_layers": nearest_first(near, layers)}
        fixes |= {name: _near(case, name) for name in dict.fromkeys([*asked, *["parallel.vpp"] * (settings.pp > 1)])}
        fixes |= {"parallel.pp": divisors(case.world_size, settings.pp)}
        if stages <= LARGEST["num_layers"] and set(asked) <= {"parallel.vpp", "parallel.pipeline_layout"}:
            fixes |= {"parallel.pipeline_layout": [even_layout(layers, stages), None]}
        shown = dict.fromkeys(("parallel.pp", *(name for name in asked if name != "parallel.pipeline_layout")))
        yield Flaw(refused, f"{error} ({', '.join(map(case.show, shown))})", fixes)


def _near(case: Case, name: str) -> Iterator[Any]:
    """Numbers near the one that the setting has, and what it is where it asks for nothing."""
    given = case.value(name)
    if isinstance(given, int) and not isinstance(given, bool):
        yield from nearest_first(range(max(0, given - 20), given + 20), given)
    yield _default(name)


def _default(name: str) -> Any:
    return SETTINGS[name].default if name in SETTINGS else None


# --- batches -------------------------------------------------------------------------------------------------------


def batch_splits_over_ranks(case: Case) -> Iterator[Flaw]:
    unit = _unit(case.config, case.world_size)
    if unit is not None and case.config.train.global_batch_size % unit:
        yield Flaw("train.global_batch_size", f"not a multiple of {_unit_shown(case)}", _batch_fixes(case))


def _unit_shown(case: Case) -> str:
    micro, replicas = case.config.train.micro_batch_size, _sizes(case)["dp"]
    ranks = f"{replicas} data-parallel ranks"
    return f"the {ranks}" if micro is None else f"train.micro_batch_size={micro} x {ranks} = {micro * replicas}"


def _batch_fixes(case: Case) -> dict[str, Iterable[Any]]:
    """A micro-batch that nobody sets is the largest that fits."""
    train, replicas = case.config.train, max(1, _sizes(case)["dp"])
    micro, batch = train.micro_batch_size, train.global_batch_size
    fixes: dict[str, Iterable[Any]] = {"train.global_batch_size": multiples((micro or 1) * replicas, batch)}
    if micro is not None:
        fixes["train.micro_batch_size"] = divisors(max(1, batch // replicas), micro)
    return fixes | {"world_size": [gcd(batch // (micro or 1), replicas) * dense_ranks(case.config)]}


def schedule_suits_the_pipeline(case: Case) -> Iterator[Flaw]:
    request, choices = schedule_request(case.config, case.world_size), SETTINGS["parallel.schedule"].choices
    for name, rule in schedule_flaws(request):
        groups, chunks = [None, *range(request.pp, request.pp + 50)], nearest_first((1, 2, 3, 4), request.vpp)
        fixes = {"parallel.microbatch_group_size": groups, **_batch_fixes(case)}
        yield Flaw(name, rule, fixes | {"parallel.schedule": choices, "parallel.vpp": chunks})
    if SCHEDULE_TRAITS[request.schedule].splitting and case.config.train.compile:
        rule = f"compiled blocks cannot put their weight gradients off, as parallel.schedule={request.schedule} does"
        yield Flaw("train.compile", rule, {"train.compile": [False], "parallel.schedule": choices})


def batches_grow_to_the_full_size(case: Case) -> Iterator[Flaw]:
    train, unit = case.config.train, _unit(case.config, case.world_size) or 1
    if train.batch_ramp is not None and (rule := ramp_flaw(train) or _uneven_ramp(case)):
        half = train.global_batch_size // unit // 2 * unit
        yield Flaw("train.batch_ramp", rule, {"train.batch_ramp": [[half, unit, 100 * train.global_batch_size], None]})


def _uneven_ramp(case: Case) -> str | None:
    """The rule that a batch smaller than the full one breaks. What the full one breaks is for other rules to say."""
    sizes, unit = ramp_sizes(case.config.train), _unit(case.config, case.world_size)
    request = schedule_request(case.config, case.world_size)
    if unit is None or sizes[-1] % unit or [*schedule_flaws(request)]:
        return None
    if uneven := [size for size in sizes[:2] if size % unit]:  # two tell for all, at equal distances
        return f"its batches of {uneven[0]} sequences are not a multiple of {_unit_shown(case)}"
    sequences = sizes[-1] // request.microbatches
    for size in sizes if SCHEDULE_TRAITS[request.schedule].chunked else ():
        for _, rule in schedule_flaws(replace(request, microbatches=size // sequences)):
            return f"its batches of {size} sequences make {size // sequences} microbatches: {rule}"
    return None


# --- one layer across ranks, and the optimizer's state --------------------------------------------------------------


def layers_split_over_tensor_parallel_ranks(case: Case) -> Iterator[Flaw]:
    tp, model, sequence_parallel = case.config.parallel.tp, case.config.model, case.config.parallel.sequence_parallel

    def flaw(name: str, rule: str, values: Iterable[Any]) -> Flaw:
        return Flaw(name, rule, {"parallel.tp": divisors(case.world_size, tp), name: values})

    if tp == 1:
        if sequence_parallel:
            yield flaw("parallel.sequence_parallel", "there is nothing to split it over with parallel.tp=1", [None])
        return
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    yield from splits(case, "model.num_attention_heads", "parallel.tp")
    if groups is not None and heads % groups == 0 and groups % tp and tp % groups:
        rule = f"neither a multiple nor a divisor of parallel.tp={tp}"
        yield flaw("model.num_key_value_heads", rule, divisors(heads, groups))
    if len(model.expert_layers) < model.num_layers:  # else no layer has an MLP
        ffn = derive_model(model, case.config.train.seq_length).ffn_hidden_size
        yield from splits(case, "model.ffn_hidden_size", "parallel.tp", derived=ffn)
    if sequence_parallel is not False:
        fixes = {"parallel.sequence_parallel": [False]}
        yield from splits(case, "train.seq_length", "parallel.tp", where=" with sequence parallelism", fixes=fixes)
    if tp > model.vocab_multiple:
        rule = f"below parallel.tp={tp}: a small vocabulary, padded to it, might leave a rank without rows"
        yield flaw("model.vocab_multiple", rule, multiples(tp, tp))


def products_can_send(case: Case) -> Iterator[Flaw]:
    """parallel.async_tp has an effect. What the machine must have for it is known later (train/device_settings.py)."""
    config, name = case.config, "parallel.async_tp"
    if not config.parallel.async_tp:
        return
    off: dict[str, Iterable[Any]] = {name: [None]}
    if config.parallel.tp == 1:
        yield Flaw(name, "has no effect with parallel.tp=1", off | {"parallel.tp": divisors(case.world_size, 2)})
    elif config.parallel.sequence_parallel is False:
        rule = "has no effect with parallel.sequence_parallel=false"
        yield Flaw(name, rule, off | {"parallel.sequence_parallel": [None]})
    elif derive_compile(config) is False:
        by = "parallel.schedule" if config.train.compile is None else "train.compile"
        rule = f"is the compiler's, and has no effect with {case.show(by)}"
        choices = SETTINGS["parallel.schedule"].choices
        yield Flaw(name, rule, off | {"train.compile": [True], "parallel.schedule": choices})
    elif config.device == "cpu":
        yield Flaw(name, "has no effect with device=cpu", off)
    elif config.train.fp8 is not None:
        rule = f"joins a gather and the product behind it, and {case.show('train.fp8')} rounds what lies between"
        yield Flaw(name, rule, off | {"train.fp8": [None]})


def instances_split_the_replicas(case: Case) -> Iterator[Flaw]:
    axes, optimizer = case.config.parallel, case.config.optimizer
    replicas = case.world_size // (axes.tp * axes.pp)  # over which the state is sharded, dp x cp
    if optimizer.zero and case.world_size % dense_ranks(case.config) == 0 and replicas % optimizer.instances:
        shown = f"{case.world_size} processes, {case.show('parallel.tp')}, {case.show('parallel.pp')}"
        fixes = {"optimizer.instances": divisors(replicas, optimizer.instances)}
        yield Flaw("optimizer.instances", f"does not divide dp x cp = {replicas} ({shown})", fixes)


LAYOUT_RULES = (order_places_the_axes, virtual_stages_need_a_pipeline, sizes_fill_the_world, pipelines_agree)
STAGE_RULES = (stages_hold_all_layers,)
SCHEDULE_RULES = (batch_splits_over_ranks, schedule_suits_the_pipeline)
PARALLEL_RULES = (
    *(*LAYOUT_RULES, *STAGE_RULES, *SCHEDULE_RULES, batches_grow_to_the_full_size),
    *(layers_split_over_tensor_parallel_ranks, products_can_send, instances_split_the_replicas),
)
