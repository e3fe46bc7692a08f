"""The rules that join the layout with the world, the batch and the model's sizes, each a function of a `Case`.

What would work where one is broken is found by `remedies.py`. Rules of pure numbers are in `megalite.layout`; here they
get the settings that they read, under the names that the user knows.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megalite.config.case import Case
from megalite.config.derive import derive_micro_batch_size, derive_model, derive_schedule
from megalite.config.schedule_rules import ScheduleRequest, schedule_flaws
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of
from megalite.config.step_plan import ramp_flaw, ramp_sizes
from megalite.layout.flaws import Flaw, Show
from megalite.layout.groups import GroupNeeds, group_flaws
from megalite.layout.layout_rules import LayoutRequest, layout_flaws, layout_of
from megalite.layout.stage_rules import StageSettings, stage_flaws

NOT_BUILT = ("cp", "ep", "etp")  # axes whose sizes above 1 are refused
LAYOUT_NAMES = {field: f"parallel.{field}" for field in ("tp", "cp", "pp", "vpp", "ep", "etp", "order")}
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
SCHEDULE_NAMES = {
    "schedule": "parallel.schedule",
    "pp": "parallel.pp",
    "vpp": "parallel.vpp",
    "microbatches": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "group_size": "parallel.microbatch_group_size",
}
GROUP_NAMES = {**LAYOUT_NAMES, "optimizer_instances": "optimizer.instances"}


def layout_request(config: Config, world_size: int) -> LayoutRequest:
    """What the config asks of a world. `etp` equal to tp is what a dense model has, too."""
    return layout_of_case(Case(config, world_size))


def layout_of_case(case: Case) -> LayoutRequest:
    axes = {field: value_of(case.config, name) for field, name in LAYOUT_NAMES.items()}
    axes["etp"] = None if axes["etp"] == axes["tp"] else axes["etp"]
    return LayoutRequest(case.world_size, dp=case.dp, experts=case.experts, **axes)


def data_parallel_size(config: Config, world_size: int) -> int | None:
    """What remains of the world, or None where the layout does not divide it."""
    product = config.parallel.tp * config.parallel.cp * config.parallel.pp
    return None if world_size % product else world_size // product


def stage_settings(config: Config) -> StageSettings:
    """Who holds which layers, as the config says it."""
    return StageSettings(**{field: value_of(config, name) for field, name in STAGE_NAMES.items()})


def stages_of_case(case: Case) -> StageSettings:
    return replace(stage_settings(case.config), split_rank=case.split_rank)


def schedule_request(config: Config, world_size: int) -> tuple[ScheduleRequest, int | None]:
    """What the config asks of a schedule, and how many sequences make one microbatch of all replicas.

    None where batch or layout do not suit the world: the request then holds as many microbatches as suit any schedule.
    """
    axes, batch = config.parallel, config.train.global_batch_size
    schedule, group_size = derive_schedule(axes), axes.microbatch_group_size
    replicas = data_parallel_size(config, world_size)
    if replicas is None or batch % _unit(config, replicas):
        known = None if schedule == "interleaved" else group_size
        return ScheduleRequest(schedule, axes.pp, axes.pp, axes.vpp, known), None
    sequences = derive_micro_batch_size(config, world_size) * replicas
    return ScheduleRequest(schedule, axes.pp, batch // sequences, axes.vpp, group_size), sequences


def _unit(config: Config, replicas: int) -> int:
    """Sequences of which every batch is a multiple."""
    return (config.train.micro_batch_size or 1) * replicas


def _named(case: Case, names: Mapping[str, str]) -> Show:
    return lambda field: case.show(names.get(field, field))


def _renamed(flaws: Iterable[Flaw], names: Mapping[str, str]) -> Iterator[Flaw]:
    for flaw in flaws:
        fixes = tuple(names.get(field, field) for field in flaw.fixes)
        yield replace(flaw, field=names.get(flaw.field, flaw.field), fixes=fixes)


# --- the rules -----------------------------------------------------------------------------------------------------


def sizes_are_built(case: Case) -> Iterator[Flaw]:
    for axis in NOT_BUILT:
        name, size = f"parallel.{axis}", getattr(case.config.parallel, axis)
        if size is not None and size > 1 and (axis, size) != ("etp", case.config.parallel.tp):
            meaning = re.split("[:;]", SETTINGS[name].meaning)[0]
            rule = (
                f"sizes above 1 are not built yet in this version ({meaning}); tensor and pipeline parallelism "
                "(parallel.tp, parallel.pp) are, and data parallelism, which takes what they leave of the world "
                f"({case.world_size} process{'es' if case.world_size > 1 else ''} here)"
            )
            yield Flaw(name, "built", rule, (name,))


def world_splits_into_the_layout(case: Case) -> Iterator[Flaw]:
    yield from _renamed(layout_flaws(layout_of_case(case), _named(case, LAYOUT_NAMES)), LAYOUT_NAMES)


def layers_split_over_stages(case: Case) -> Iterator[Flaw]:
    yield from _renamed(stage_flaws(stages_of_case(case), _named(case, STAGE_NAMES)), STAGE_NAMES)


def batch_splits_over_ranks(case: Case) -> Iterator[Flaw]:
    train, replicas = case.config.train, data_parallel_size(case.config, case.world_size)
    if replicas is not None and train.global_batch_size % _unit(case.config, replicas):
        fixes = ("train.global_batch_size", "train.micro_batch_size", "world_size")
        yield Flaw("train.global_batch_size", "batch", f"not a multiple of {_ranks(case.config, replicas)}", fixes)


def _ranks(config: Config, replicas: int) -> str:
    micro, ranks = config.train.micro_batch_size, f"{replicas} data-parallel ranks"
    return f"the {ranks}" if micro is None else f"train.micro_batch_size={micro} x {ranks} = {micro * replicas}"


def schedule_suits_the_pipeline(case: Case) -> Iterator[Flaw]:
    request, _ = schedule_request(case.config, case.world_size)

    def show(field: str) -> str:  # a schedule that is derived has a name, too
        return f"parallel.schedule={request.schedule}" if field == "schedule" else case.show(SCHEDULE_NAMES[field])

    yield from _renamed(schedule_flaws(request, show), SCHEDULE_NAMES)
    if request.schedule == "zb-h1" and case.config.train.compile:
        rule = "compiled blocks cannot put their weight gradients off, as parallel.schedule=zb-h1 does"
        yield Flaw("train.compile", "compiled", rule, ("train.compile", "parallel.schedule"))


def batches_grow_to_the_full_size(case: Case) -> Iterator[Flaw]:
    if case.config.train.batch_ramp is not None and (rule := ramp_flaw(case.config.train) or _uneven_ramp(case)):
        yield Flaw("train.batch_ramp", "ramp", rule, ("train.batch_ramp",))


def _uneven_ramp(case: Case) -> str | None:
    """The rule that a batch smaller than the full one breaks. What the full one breaks is for other rules to say."""
    config = case.config
    request, sequences = schedule_request(config, case.world_size)
    replicas = data_parallel_size(config, case.world_size)
    if sequences is None or replicas is None:
        return None
    before = {flaw.key for flaw in schedule_flaws(request)}
    for size in ramp_sizes(config.train)[:-1]:
        if size % _unit(config, replicas):
            return f"its batches of {size} sequences are not a multiple of {_ranks(config, replicas)}"
        smaller = replace(request, microbatches=size // sequences)
        if kinds := [flaw.kind for flaw in schedule_flaws(smaller) if flaw.key not in before]:
            needs = f"{request.schedule} needs one for each of parallel.pp={request.pp} ranks"
            group = f"parallel.microbatch_group_size={request.group_size} does not divide them as it must"
            made = "1 microbatch" if smaller.microbatches == 1 else f"{smaller.microbatches} microbatches"
            return f"its batches of {size} sequences make {made}, and {needs if 'few' in kinds else group}"
    return None


def model_splits_over_tensor_parallel_ranks(case: Case) -> Iterator[Flaw]:
    config = case.config
    tp, model, length = config.parallel.tp, config.model, config.train.seq_length
    if tp == 1:
        if config.parallel.sequence_parallel:
            rule = "there is nothing to split it over with parallel.tp=1"
            yield Flaw("parallel.sequence_parallel", "tensor", rule, ("parallel.sequence_parallel", "parallel.tp"))
        return
    derived = derive_model(model, length)
    heads, groups, ffn = model.num_attention_heads, derived.num_key_value_heads, derived.ffn_hidden_size
    assert groups is not None
    assert ffn is not None
    over = f"does not split over parallel.tp={tp}"
    uneven_groups = model.num_key_value_heads is not None and heads % groups == 0 and groups % tp and tp % groups
    padded = "a small vocabulary, padded to a multiple of it, might leave a rank without rows"
    for name, broken, rule in (
        ("model.num_attention_heads", heads % tp, over),
        ("model.num_key_value_heads", uneven_groups, f"neither a multiple nor a divisor of parallel.tp={tp}"),
        ("model.ffn_hidden_size", ffn % tp, over if model.ffn_hidden_size else f"derived as {ffn}, {over}"),
        (
            "train.seq_length",
            config.parallel.sequence_parallel is not False and length % tp,
            f"{over} with sequence parallelism",
        ),
        ("model.vocab_multiple", tp > model.vocab_multiple, f"below parallel.tp={tp}: {padded}"),
    ):
        if broken:
            more = ("parallel.sequence_parallel",) if name == "train.seq_length" else ()
            yield Flaw(name, "tensor", rule, ("parallel.tp", name, *more))


def instances_split_the_replicas(case: Case) -> Iterator[Flaw]:
    request, instances = layout_of_case(case), case.config.optimizer.instances
    if case.config.optimizer.zero == 0 or instances == 1 or layout_flaws(request):
        return
    flaws = group_flaws(layout_of(request), GroupNeeds(optimizer_instances=instances), _named(case, GROUP_NAMES))
    for flaw in _renamed(flaws, GROUP_NAMES):
        ranks = f"{case.world_size} processes, parallel.tp={request.tp}, parallel.pp={request.pp}"
        yield replace(flaw, rule=f"{flaw.rule} ({ranks})")


PARALLEL_RULES = (
    sizes_are_built,
    batch_splits_over_ranks,
    world_splits_into_the_layout,
    layers_split_over_stages,
    schedule_suits_the_pipeline,
    model_splits_over_tensor_parallel_ranks,
    instances_split_the_replicas,
    batches_grow_to_the_full_size,
)
