"""The rules that join the layout with the world, the batch and the model's sizes; rules.py says what a rule is.

Values of a remedy are tried on the whole config: `misfits` says what a layout does not suit, before and after.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from megalite.config.advice import either, nearest_of
from megalite.config.derive import absolute, derive_micro_batch_size, derive_model, derive_schedule
from megalite.config.problems import Problem, UserError
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values
from megalite.config.step_plan import ramp_flaw, ramp_sizes
from megalite.parallel import schedule_rules, stage_rules
from megalite.parallel.layout_rules import LayoutRequest, divisors, layout_problems
from megalite.parallel.nccl_options import read_nccl_options
from megalite.parallel.schedule_rules import Naming, ScheduleRequest
from megalite.parallel.stage_rules import StageSettings

NOT_BUILT = ("cp", "ep", "etp")  # axes whose sizes above 1 are refused
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
SCHEDULE_NAMES = Naming(
    schedule="parallel.schedule",
    pp="parallel.pp",
    vpp="parallel.vpp",
    microbatches="train.global_batch_size",
    group_size="parallel.microbatch_group_size",
)
UNSPLIT_BATCH, FEW_MICROBATCHES = (("batch", "train.global_batch_size"), ("schedule few", "train.global_batch_size"))
COMPILED = ("compiled", "train.compile")
RAMP = ("ramp", "train.batch_ramp")


def parallel_sizes_are_built(config: Config, world_size: int) -> Iterator[Problem]:
    for axis in NOT_BUILT:
        size, meaning = getattr(config.parallel, axis), SETTINGS[f"parallel.{axis}"].meaning
        if size is not None and size > 1 and (axis, size) != ("etp", config.parallel.tp):
            yield Problem(
                f"parallel.{axis}",
                size,
                f"sizes above 1 are not built yet in this version ({re.split('[:;]', meaning)[0]})",
                f"parallel.{axis}=1; tensor and pipeline parallelism (parallel.tp, parallel.pp) are built, and data "
                "parallelism, which takes what they leave of the world "
                f"({world_size} process{'es' if world_size > 1 else ''} here)",
            )


def tensor_misfits(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Setting, value and rule of all that parallel.tp does not split; tensor_rules.py says what would work."""
    tp, model, length = config.parallel.tp, config.model, config.train.seq_length
    if tp == 1:
        if config.parallel.sequence_parallel:
            yield "parallel.sequence_parallel", True, "there is nothing to split it over with parallel.tp=1"
        return
    derived = derive_model(model, length)
    heads, groups, ffn = model.num_attention_heads, derived.num_key_value_heads, derived.ffn_hidden_size
    assert groups is not None
    assert ffn is not None
    if heads % tp:
        yield "model.num_attention_heads", heads, f"does not split over parallel.tp={tp}"
    if model.num_key_value_heads is not None and heads % groups == 0 and groups % tp and tp % groups:
        yield "model.num_key_value_heads", groups, f"neither a multiple nor a divisor of parallel.tp={tp}"
    if ffn % tp:
        yield "model.ffn_hidden_size", ffn, f"does not split over parallel.tp={tp}"
    if config.parallel.sequence_parallel is not False and length % tp:
        yield "train.seq_length", length, f"does not split over parallel.tp={tp} with sequence parallelism"
    if tp > model.vocab_multiple:
        uneven = "a small vocabulary, padded to a multiple of it, might leave a rank without rows"
        yield "model.vocab_multiple", model.vocab_multiple, f"below parallel.tp={tp}: {uneven}"


def world_splits_into_the_layout(config: Config, world_size: int) -> Iterator[Problem]:
    def suits(changed: LayoutRequest) -> bool:
        sizes = {f"parallel.{axis}": getattr(changed, axis) for axis in ("tp", "cp", "pp", "vpp", "ep")}
        return misfits(with_values(config, sizes), changed.world_size) <= misfits(config, world_size)

    yield from layout_problems(layout_request(config, world_size), parallel_setting, suits)


def batch_splits_over_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    replicas = data_parallel_size(config, world_size)
    if replicas is None or _batch_splits(config, replicas):
        return
    works = [f"train.global_batch_size={either(batch_sizes(config, world_size))}"]
    if micro is not None and batch % replicas == 0:
        works += [
            f"train.micro_batch_size={either(sizes)}" for sizes in [micro_batch_sizes(config, world_size)] if sizes
        ]
    elif batch % (micro or 1) == 0:
        fewer = gcd(batch // (micro or 1), replicas) * world_size // replicas
        if misfits(config, fewer) <= misfits(config, world_size):
            works.append(f"{fewer} processes" if micro is None else f"a number of processes like {fewer}")
    ranks = f"{replicas} data-parallel ranks"
    rule = f"the {ranks}" if micro is None else f"train.micro_batch_size={micro} x {ranks} = {micro * replicas}"
    yield Problem("train.global_batch_size", batch, f"not a multiple of {rule}", ", or ".join(works))


def batch_sizes(config: Config, world_size: int) -> list[int]:
    """The nearest two around the batch that split over the ranks and, as far as they do, suit the schedule."""
    train, replicas = config.train, data_parallel_size(config, world_size) or 1
    unit = (train.micro_batch_size or 1) * replicas
    below = train.global_batch_size // unit * unit
    near = [size for size in (below, below + unit) if size]
    enough = max(below + unit, config.parallel.pp * unit)  # microbatches for every rank
    allowed = misfits(config, world_size) - {UNSPLIT_BATCH, FEW_MICROBATCHES}
    fit = [
        size
        for size in dict.fromkeys((*near, enough))
        if misfits(with_values(config, {"train.global_batch_size": size}), world_size) <= allowed
    ]
    return fit[:2] or near


def micro_batch_sizes(config: Config, world_size: int) -> list[int]:
    """The nearest that split a rank's share of the batch into microbatches which suit the schedule, ascending."""
    train = config.train
    allowed = misfits(config, world_size) - {UNSPLIT_BATCH, FEW_MICROBATCHES}
    replicas = data_parallel_size(config, world_size)
    assert replicas is not None
    assert train.micro_batch_size is not None
    sizes = divisors(train.global_batch_size // replicas)
    fit = [n for n in sizes if misfits(with_values(config, {"train.micro_batch_size": n}), world_size) <= allowed]
    return nearest_of(fit, train.micro_batch_size)


def nccl_options_can_be_read(config: Config, world_size: int) -> Iterator[Problem]:
    path = config.parallel.nccl_options
    if path is not None:
        try:
            read_nccl_options(Path(absolute(path)))
        except UserError as error:
            yield from error.problems


def layout_request(config: Config, world_size: int) -> LayoutRequest:
    """What the config asks of a world. `etp` equal to tp is what a dense model has, too."""
    axes = config.parallel
    etp = None if axes.etp == axes.tp else axes.etp
    return LayoutRequest(
        world_size, tp=axes.tp, cp=axes.cp, pp=axes.pp, vpp=axes.vpp, ep=axes.ep, etp=etp, order=axes.order
    )


def parallel_setting(field: str) -> str:
    """How a user knows a field of `LayoutRequest`."""
    return "world size" if field == "world_size" else f"parallel.{field}"


def data_parallel_size(config: Config, world_size: int) -> int | None:
    """What remains of the world, or None where the layout does not divide it."""
    product = config.parallel.tp * config.parallel.cp * config.parallel.pp
    return None if world_size % product else world_size // product


def stage_settings(config: Config) -> StageSettings:
    """Who holds which layers, as the config says it."""
    return StageSettings(**{field: value_of(config, name) for field, name in STAGE_NAMES.items()})


def schedule_request(config: Config, world_size: int) -> tuple[ScheduleRequest, int | None]:
    """What the config asks of a schedule, and how many sequences make one microbatch of all replicas.

    None where batch or layout do not suit the world: the request then holds as many microbatches as suit any schedule.
    """
    axes, batch = config.parallel, config.train.global_batch_size
    schedule, group_size = derive_schedule(axes), axes.microbatch_group_size
    replicas = data_parallel_size(config, world_size)
    if replicas is None or not _batch_splits(config, replicas):
        known = None if schedule == "interleaved" else group_size
        return ScheduleRequest(schedule, axes.pp, axes.pp, axes.vpp, known), None
    sequences = derive_micro_batch_size(config, world_size) * replicas
    return ScheduleRequest(schedule, axes.pp, batch // sequences, axes.vpp, group_size), sequences


def misfits(config: Config, world_size: int) -> frozenset[tuple[str, str]]:
    """What does not suit the layout, as (rule, setting): to see whether a change would break one more.

    The first word of a rule is tensor, stages, schedule, batch, ramp or compiled.
    """
    request, _ = schedule_request(config, world_size)
    replicas = data_parallel_size(config, world_size)
    found = {("tensor", setting) for setting, _, _ in tensor_misfits(config)}
    broken = stage_rules.broken_rules(stage_settings(config))
    found |= {(f"stages {kind}", STAGE_NAMES[field]) for field, kind in broken}
    found |= {
        (f"schedule {kind}", getattr(SCHEDULE_NAMES, field)) for field, kind in schedule_rules.broken_rules(request)
    }
    if replicas is not None and not _batch_splits(config, replicas):
        found.add(UNSPLIT_BATCH)
    if ramp_misfit(config, world_size):
        found.add(RAMP)
    if request.schedule == "zb-h1" and config.train.compile:
        found.add(COMPILED)
    return frozenset(found)


def ramp_misfit(config: Config, world_size: int) -> str | None:
    """The rule that train.batch_ramp breaks, if its numbers are no ramp or a batch smaller than the full one does not
    suit the layout. What does not suit the full one either is for other rules to say."""
    if config.train.batch_ramp is None or (flaw := ramp_flaw(config.train)):
        return None if config.train.batch_ramp is None else flaw
    request, sequences = schedule_request(config, world_size)
    replicas, micro = data_parallel_size(config, world_size), config.train.micro_batch_size
    if sequences is None or replicas is None:
        return None
    before = schedule_rules.broken_rules(request)
    for size in ramp_sizes(config.train)[:-1]:
        if size % (replicas * (micro or 1)):
            ranks = f"{replicas} data-parallel ranks"
            unit = f"the {ranks}" if micro is None else f"train.micro_batch_size={micro} x {ranks} = {micro * replicas}"
            return f"its batches of {size} sequences are not a multiple of {unit}"
        microbatches = size // sequences
        if broken := schedule_rules.broken_rules(replace(request, microbatches=microbatches)) - before:
            few = any(kind == "few" for _, kind in broken)
            needs = f"{request.schedule} needs one for each of parallel.pp={request.pp} ranks"
            group = f"parallel.microbatch_group_size={request.group_size} does not divide them as it must"
            made = "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
            return f"its batches of {size} sequences make {made}, and {needs if few else group}"
    return None


def _batch_splits(config: Config, replicas: int) -> bool:
    return config.train.global_batch_size % ((config.train.micro_batch_size or 1) * replicas) == 0


PARALLEL_RULES = (
    parallel_sizes_are_built,
    world_splits_into_the_layout,
    nccl_options_can_be_read,
)
