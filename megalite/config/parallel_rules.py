"""The rules that join the layout with the world, the batch and the model's sizes; remedies.py says what a rule is."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import gcd, lcm
from typing import Any

from megalite.config.derive import derive_micro_batch_size, derive_model, derive_schedule
from megalite.config.remedies import Case, Flaw, problems_of
from megalite.config.schedule_rules import CHUNKED, SPLITTING, ScheduleRequest, schedule_flaws
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of
from megalite.config.step_plan import ramp_flaw, ramp_sizes
from megalite.errors.problems import UserError
from megalite.errors.remedies import divisors, multiples, nearest_first
from megalite.layout.ranks import DEFAULT_ORDER, ParallelLayout, pipeline_strides
from megalite.layout.stage_string import even_layout, layout_counts
from megalite.layout.stages import StageSettings, stage_counts

NOT_BUILT = ("cp", "ep", "etp")  # axes whose sizes above 1 are refused
AXES = tuple(DEFAULT_ORDER.split("-"))
STAGE_NAMES = {  # how a user knows the fields of `StageSettings`
    "num_layers": "model.num_layers",
    "pp": "parallel.pp",
    "vpp": "parallel.vpp",
    "standalone_embedding": "parallel.standalone_embedding",
    "first_layers": "parallel.first_stage_layers",
    "last_layers": "parallel.last_stage_layers",
    "count_embedding": "parallel.count_embedding",
    "count_loss": "parallel.count_loss",
    "layout": "parallel.pipeline_layout",
}
MOST_LAYERS = 10_000  # as bounds.py has it


# --- what is asked, as numbers -------------------------------------------------------------------------------------


def layout_of(case: Case) -> ParallelLayout:
    """The layout that the config asks for, or a UserError with everything that is wrong with it."""
    if problems := problems_of(case, LAYOUT_RULES):
        raise UserError(problems)
    axes = case.config.parallel
    etp = (axes.etp or axes.tp) if has_experts(case) else None
    dp = case.world_size // dense_ranks(case.config)
    return ParallelLayout(axes.tp, axes.cp, dp, axes.pp, axes.vpp, axes.ep, etp, axes.order)


def has_experts(case: Case) -> bool:
    """Whether it is the layout of a mixture of experts. `etp` equal to tp is what a dense model has, too."""
    axes = case.config.parallel
    return case.experts or axes.ep > 1 or axes.etp not in (None, axes.tp)


def dense_ranks(config: Config) -> int:
    """Ranks that hold one copy of the dense layers."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def expert_ranks(config: Config) -> int:
    """Ranks that hold one copy of the experts."""
    return (config.parallel.etp or config.parallel.tp) * config.parallel.ep * config.parallel.pp


def least_world(config: Config) -> int:
    """Ranks of the smallest world that the layout fills."""
    return lcm(dense_ranks(config), expert_ranks(config))


def stage_settings(config: Config, split_rank: int | None = None) -> StageSettings:
    """Who holds which layers, as the config says it."""
    return StageSettings(
        **{field: value_of(config, name) for field, name in STAGE_NAMES.items()}, split_rank=split_rank
    )


def schedule_request(config: Config, world_size: int) -> ScheduleRequest:
    """What the config asks of a schedule. pp microbatches, which suit any, where batch or layout do not fit."""
    axes, schedule = config.parallel, derive_schedule(config.parallel)
    unit = _unit(config, world_size)
    if unit is None or config.train.global_batch_size % unit:
        group_size = None if schedule in CHUNKED else axes.microbatch_group_size
        return ScheduleRequest(schedule, axes.pp, axes.pp, axes.vpp, group_size)
    sequences = derive_micro_batch_size(config, world_size) * world_size // dense_ranks(config)
    microbatches = config.train.global_batch_size // sequences
    return ScheduleRequest(schedule, axes.pp, microbatches, axes.vpp, axes.microbatch_group_size)


def _unit(config: Config, world_size: int) -> int | None:
    """Sequences of which every batch is a multiple; None where the layout does not divide the world."""
    replicas, rest = divmod(world_size, dense_ranks(config))
    return None if rest else (config.train.micro_batch_size or 1) * replicas


# --- ranks ---------------------------------------------------------------------------------------------------------


def sizes_are_built(case: Case) -> Iterator[Flaw]:
    for axis in NOT_BUILT:
        name, size = f"parallel.{axis}", getattr(case.config.parallel, axis)
        if size is not None and size > 1 and (axis, size) != ("etp", case.config.parallel.tp):
            meaning = re.split("[:;]", SETTINGS[name].meaning)[0]
            rule = (
                f"sizes above 1 are not built yet ({meaning}); parallel.tp and parallel.pp are, and data parallelism, "
                f"which takes what they leave of the {case.world_size} processes here"
            )
            yield Flaw(name, rule, {name: [SETTINGS[name].default]})


def order_places_the_axes(case: Case) -> Iterator[Flaw]:
    """An axis that the order leaves out has no place unless its size is 1."""
    axes, order = case.config.parallel, case.config.parallel.order
    named = order.split("-")
    placed = [axis for axis in dict.fromkeys(order.lower().split("-")) if axis in AXES]
    complete = "-".join([*placed, *(axis for axis in AXES if axis not in placed)])
    fixes = {"parallel.order": ["-".join(placed), complete, DEFAULT_ORDER]}
    if sorted(named) != sorted(placed):
        rule = f"must name axes of {', '.join(AXES)}, in lower case and none twice"
        yield Flaw("parallel.order", rule, fixes)
        return
    dp, rest = divmod(case.world_size, dense_ranks(case.config))
    edp = case.world_size // expert_ranks(case.config) if has_experts(case) else 1
    above_one = {axis for axis in ("tp", "cp", "ep", "pp") if getattr(axes, axis) > 1}
    above_one |= {"tp"} if (axes.etp or 1) > 1 else set()
    above_one |= {"dp"} if not rest and max(dp, edp) > 1 else set()
    for axis in (axis for axis in AXES if axis in above_one and axis not in named):
        size = f"dp={dp}" if axis == "dp" else case.show(f"parallel.{axis}")
        yield Flaw("parallel.order", f"has no place for {axis}, but {size}", fixes)


def virtual_stages_need_a_pipeline(case: Case) -> Iterator[Flaw]:
    axes = case.config.parallel
    if axes.vpp > 1 and axes.pp == 1:
        rule = "virtual stages divide the stages of a pipeline, and parallel.pp=1 has none"
        yield Flaw("parallel.vpp", rule, {"parallel.vpp": [1], "parallel.pp": divisors(case.world_size, 1)})


def sizes_fill_the_world(case: Case) -> Iterator[Flaw]:
    world, dense, expert = case.world_size, dense_ranks(case.config), expert_ranks(case.config)
    if world % dense:
        shown = case.show("parallel.tp", "parallel.cp", "parallel.pp")
        yield Flaw("world_size", f"not a multiple of {shown} = {dense}", _sizes(case, "tp", "cp", "pp", "etp"))
    if has_experts(case) and world % expert:
        etp = "tp" if case.config.parallel.etp is None else "etp"
        shown = case.show(f"parallel.{etp}", "parallel.ep", "parallel.pp")
        rule = f"not a multiple of {shown} = {expert}, the ranks of one set of experts"
        yield Flaw("world_size", rule, _sizes(case, etp, "ep", "pp"))


def pipelines_agree(case: Case) -> Iterator[Flaw]:
    """Activations flow along one pipeline, so dense layers and experts must agree who is next."""
    axes, config = case.config.parallel, case.config
    faulty = (*order_places_the_axes(case), *sizes_fill_the_world(case))
    if axes.pp == 1 or not has_experts(case) or faulty:
        return
    etp, dp, edp = axes.etp or axes.tp, case.world_size // dense_ranks(config), case.world_size // expert_ranks(config)
    sizes = {"tp": axes.tp, "cp": axes.cp, "dp": dp, "pp": axes.pp, "ep": axes.ep, "etp": etp, "edp": edp}
    dense, expert = pipeline_strides(axes.order, sizes)
    if dense != expert:
        rule = f"neighbouring stages are {dense} ranks apart for dense layers, {expert} for experts"
        outermost = "-".join([*(axis for axis in axes.order.split("-") if axis != "pp"), "pp"])
        yield Flaw("parallel.order", rule, {"parallel.order": [outermost, DEFAULT_ORDER]})


def _sizes(case: Case, *axes: str) -> dict[str, Iterator[int]]:
    """Worlds that the layout fills, and sizes to try of the axes that are split."""
    worlds = islice(multiples(least_world(case.config), case.world_size), 4)
    given = {f"parallel.{axis}": getattr(case.config.parallel, axis) or 1 for axis in axes}
    sizes = {name: divisors(case.world_size, size) for name, size in given.items() if size > 1}
    return {"world_size": worlds, **sizes}


# --- stages of a pipeline ------------------------------------------------------------------------------------------


def settings_of_stages_do_not_clash(case: Case) -> Iterator[Flaw]:
    settings = stage_settings(case.config, case.split_rank)
    for field, others in settings.clashes.items():
        rule = f"cannot be combined with {' and '.join(case.show(_stage_name(other)) for other in others)}"
        fixes = {_stage_name(name): _plain(_stage_name(name)) for name in (field, *others)}
        yield Flaw(_stage_name(field), rule, fixes)


def stages_hold_all_layers(case: Case) -> Iterator[Flaw]:
    settings = stage_settings(case.config, case.split_rank)
    if settings.clashes or (settings.vpp > 1 and settings.pp == 1):  # another rule says so
        return
    try:
        stage_counts(settings)
    except ValueError as error:
        asked = [_stage_name(field) for field in settings.asked()]
        changed = dict.fromkeys([*asked, *["parallel.vpp"] * (settings.pp > 1)])
        layout, layers, stages = settings.layout, settings.num_layers, settings.pp * settings.vpp
        named = dict.fromkeys(("parallel.pp", *(name for name in asked if name != "parallel.pipeline_layout")))
        refused = "model.num_layers" if layout is None else "parallel.pipeline_layout"
        fixes: dict[str, Any] = {"model.num_layers": _layers_that_fit(settings)}
        fixes |= {name: _numbers(case, name) for name in changed}
        fixes |= {"parallel.pp": divisors(case.world_size, settings.pp)}
        if stages <= MOST_LAYERS and set(asked) <= {"parallel.vpp", "parallel.pipeline_layout"}:
            fixes |= {"parallel.pipeline_layout": [even_layout(layers, stages), *_plain("parallel.pipeline_layout")]}
        yield Flaw(refused, f"{error} ({', '.join(map(case.show, named))})", fixes)


def _stage_name(field: str) -> str:
    return STAGE_NAMES.get(field, field)


def _plain(name: str) -> list[Any]:
    """What the setting is where it asks for nothing."""
    return [SETTINGS[name].default if name in SETTINGS else None]


def _numbers(case: Case, name: str) -> Iterator[Any]:
    """Numbers near the one that the setting has, and what it is where it asks for nothing."""
    given = case.value(name)
    if isinstance(given, int) and not isinstance(given, bool):
        least = 1 if name in ("split_rank", "parallel.vpp") else 0
        yield from nearest_first(range(max(least, given - 30), given + 30), given)
    yield from _plain(name)


def _layers_that_fit(settings: StageSettings) -> Iterator[int]:
    """Numbers of layers that the other settings place, if any do."""
    alone, split = int(settings.standalone_embedding), settings.split_rank
    if settings.layout is not None:
        with suppress(ValueError):
            yield sum(layout_counts(settings.layout))
    elif split is not None:
        yield from multiples(lcm(max(1, split - alone), max(1, settings.pp - split)), settings.num_layers)
    else:
        ends = [end for end in (settings.first_layers, settings.last_layers) if end is not None]
        taken = sum(ends) - settings.count_embedding - settings.count_loss
        unit = max(1, settings.pp - len(ends) - alone) * settings.vpp
        yield taken
        yield from (taken + rest for rest in multiples(unit, max(1, settings.num_layers - taken)))


# --- batches -------------------------------------------------------------------------------------------------------


def batch_splits_over_ranks(case: Case) -> Iterator[Flaw]:
    train, unit = case.config.train, _unit(case.config, case.world_size)
    if unit is not None and train.global_batch_size % unit:
        yield Flaw("train.global_batch_size", f"not a multiple of {_unit_shown(case)}", _batch_fixes(case))


def _unit_shown(case: Case) -> str:
    micro, replicas = case.config.train.micro_batch_size, case.world_size // dense_ranks(case.config)
    ranks = f"{replicas} data-parallel ranks"
    return f"the {ranks}" if micro is None else f"train.micro_batch_size={micro} x {ranks} = {micro * replicas}"


def _batch_fixes(case: Case) -> dict[str, Iterator[int]]:
    train, ranks = case.config.train, dense_ranks(case.config)
    replicas, micro, batch = max(1, case.world_size // ranks), train.micro_batch_size, train.global_batch_size
    fixes = {"train.global_batch_size": multiples((micro or 1) * replicas, batch)}
    if micro is not None:  # who leaves it open gets the largest that fits
        fixes |= {"train.micro_batch_size": divisors(max(1, batch // replicas), micro)}
    return fixes | {"world_size": iter([gcd(batch // (micro or 1), replicas) * ranks])}


def schedule_suits_the_pipeline(case: Case) -> Iterator[Flaw]:
    request = schedule_request(case.config, case.world_size)
    choices = SETTINGS["parallel.schedule"].choices
    chunks = list(nearest_first((1, 2, 3, 4), request.vpp))
    group = nearest_first({request.pp, *range(max(1, request.pp), min(request.microbatches, 100) + 1)}, request.pp)
    for name, rule in schedule_flaws(request):
        fixes: dict[str, Any] = {"parallel.schedule": choices, "parallel.vpp": chunks}
        if name == "train.global_batch_size":
            fixes = {**_batch_fixes(case), "parallel.schedule": choices}
        elif name == "parallel.microbatch_group_size":
            fixes = {name: [None, *group], "train.global_batch_size": _batch_fixes(case)["train.global_batch_size"]}
        yield Flaw(name, rule, fixes)
    if request.schedule in SPLITTING and case.config.train.compile:
        rule = f"compiled blocks cannot put their weight gradients off, as parallel.schedule={request.schedule} does"
        yield Flaw("train.compile", rule, {"train.compile": [False], "parallel.schedule": choices})


def batches_grow_to_the_full_size(case: Case) -> Iterator[Flaw]:
    ramp = case.config.train.batch_ramp
    if ramp is not None and (rule := ramp_flaw(case.config.train) or _uneven_ramp(case)):
        yield Flaw("train.batch_ramp", rule, {"train.batch_ramp": _ramps(case)})


def _uneven_ramp(case: Case) -> str | None:
    """The rule that a batch smaller than the full one breaks. What the full one breaks is for other rules to say."""
    config, unit = case.config, _unit(case.config, case.world_size)
    request = schedule_request(config, case.world_size)
    if unit is None or config.train.global_batch_size % unit or [*schedule_flaws(request)]:
        return None
    sizes = ramp_sizes(config.train)
    if uneven := next((size for size in sizes[:2] if size % unit), 0):
        return f"its batches of {uneven} sequences are not a multiple of {_unit_shown(case)}"
    sequences = config.train.global_batch_size // request.microbatches
    for size in sizes if request.schedule in CHUNKED else ():
        for _, rule in schedule_flaws(replace(request, microbatches=size // sequences)):
            return f"its batches of {size} sequences make {size // sequences} microbatches: {rule}"
    return None


def _ramps(case: Case) -> Iterator[list[int] | None]:
    """Ramps of at most a hundred sizes: near the one that is given, then of equal sizes."""
    full, unit = case.config.train.global_batch_size, _unit(case.config, case.world_size) or 1
    usual = (full // 2, full // 2, 100 * full)
    given = [*(case.config.train.batch_ramp or [])[:3], *usual[len(case.config.train.batch_ramp or []) :]]
    start, increment, samples = (max(1, number) for number in given)
    starts = islice(multiples(unit, min(start, full - 1)), 8)
    tried = [(first, step) for first in starts if first < full for step in divisors(full - first, increment)]
    few = [(first, step) for first, step in tried if step % unit == 0 and full <= 100 * step]
    for first, step in sorted(few, key=lambda each: abs(each[0] - start) + abs(each[1] - increment)):
        yield [first, step, samples]
    yield None


# --- one layer across ranks, and the optimizer's state --------------------------------------------------------------


def model_splits_over_tensor_parallel_ranks(case: Case) -> Iterator[Flaw]:
    config, tp = case.config, case.config.parallel.tp
    model, length, sequence_parallel = config.model, config.train.seq_length, config.parallel.sequence_parallel

    def fixes(name: str, values: Iterable[Any]) -> dict[str, Any]:
        return {"parallel.tp": divisors(case.world_size, tp), name: values}

    if tp == 1:
        if sequence_parallel:
            rule = "there is nothing to split it over with parallel.tp=1"
            unset_first = dict(reversed(fixes("parallel.sequence_parallel", [None]).items()))
            yield Flaw("parallel.sequence_parallel", rule, unset_first)
        return
    derived = derive_model(model, length)
    heads, groups, ffn = model.num_attention_heads, derived.num_key_value_heads or 1, derived.ffn_hidden_size or 1
    over = f"does not split over parallel.tp={tp}"
    if heads % tp:
        yield Flaw("model.num_attention_heads", over, fixes("model.num_attention_heads", multiples(tp, heads)))
    if model.num_key_value_heads is not None and heads % groups == 0 and groups % tp and tp % groups:
        rule = f"neither a multiple nor a divisor of parallel.tp={tp}"
        yield Flaw("model.num_key_value_heads", rule, fixes("model.num_key_value_heads", divisors(heads, groups)))
    if ffn % tp:
        rule = over if model.ffn_hidden_size else f"derived as {ffn}, {over}"
        yield Flaw("model.ffn_hidden_size", rule, fixes("model.ffn_hidden_size", multiples(tp, ffn)))
    if sequence_parallel is not False and length % tp:
        more = fixes("train.seq_length", multiples(tp, length)) | {"parallel.sequence_parallel": [False]}
        yield Flaw("train.seq_length", f"{over} with sequence parallelism", more)
    if tp > model.vocab_multiple:
        rule = f"below parallel.tp={tp}: a small vocabulary, padded to it, might leave a rank without rows"
        yield Flaw("model.vocab_multiple", rule, fixes("model.vocab_multiple", multiples(tp, tp)))


def instances_split_the_replicas(case: Case) -> Iterator[Flaw]:
    axes, optimizer = case.config.parallel, case.config.optimizer
    replicas = case.world_size // (axes.tp * axes.pp)  # over which the state is sharded, dp x cp
    if optimizer.zero and case.world_size % dense_ranks(case.config) == 0 and replicas % optimizer.instances:
        rule = f"does not divide dp x cp = {replicas} ({case.world_size} processes, parallel.tp={axes.tp}, "
        fixes = {"optimizer.instances": divisors(replicas, optimizer.instances)}
        yield Flaw("optimizer.instances", f"{rule}parallel.pp={axes.pp})", fixes)


LAYOUT_RULES = (order_places_the_axes, virtual_stages_need_a_pipeline, sizes_fill_the_world, pipelines_agree)
STAGE_RULES = (settings_of_stages_do_not_clash, stages_hold_all_layers)
SCHEDULE_RULES = (batch_splits_over_ranks, schedule_suits_the_pipeline)
PARALLEL_RULES = (
    *(sizes_are_built, *LAYOUT_RULES, *STAGE_RULES, *SCHEDULE_RULES, batches_grow_to_the_full_size),
    *(model_splits_over_tensor_parallel_ranks, instances_split_the_replicas),
)
