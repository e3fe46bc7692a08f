"""The rules that join the layout with the world and with the model's sizes; rules.py says what a rule is."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from megalite.config.advice import around, divisors_near, either
from megalite.config.derive import absolute, derive_model
from megalite.config.problems import Problem, UserError
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS
from megalite.parallel.layout_rules import LayoutRequest, layout_problems, pipeline_sizes
from megalite.parallel.nccl_options import read_nccl_options
from megalite.parallel.stage_rules import StageSettings, broken_rules, stage_problems

NOT_BUILT = ("cp", "pp", "vpp", "ep", "etp")  # axes whose sizes above 1 are refused


def parallel_sizes_are_built(config: Config, world_size: int) -> Iterator[Problem]:
    for axis in NOT_BUILT:
        size, meaning = getattr(config.parallel, axis), SETTINGS[f"parallel.{axis}"].meaning
        if size is not None and size > 1 and (axis, size) != ("etp", config.parallel.tp):
            yield Problem(
                f"parallel.{axis}",
                size,
                f"sizes above 1 are not built yet in this version ({re.split('[:;]', meaning)[0]})",
                f"parallel.{axis}=1; tensor parallelism (parallel.tp) is built, and data parallelism, which takes what "
                f"it leaves of the world ({world_size} process{'es' if world_size > 1 else ''} here)",
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
    def model_accepts(changed: LayoutRequest) -> bool:
        then = StageSettings(config.model.num_layers, changed.pp, changed.vpp)
        stages = changed.pp == 1 or broken_rules(then) <= broken_rules(_stages(config))
        return stages and _unsplit(replace(config, parallel=replace(config.parallel, tp=changed.tp))) <= unsplit

    unsplit = _unsplit(config)
    yield from layout_problems(layout_request(config, world_size), parallel_setting, model_accepts)


def layers_split_over_stages(config: Config, world_size: int) -> Iterator[Problem]:
    names = {"num_layers": "model.num_layers", "pp": "parallel.pp", "vpp": "parallel.vpp"}
    if config.parallel.pp > 1:  # else it is one stage, and the layout's rules speak about vpp
        yield from stage_problems(_stages(config), names, pipeline_sizes(layout_request(config, world_size)))


def _unsplit(config: Config) -> set[str]:
    return {setting for setting, _, _ in tensor_misfits(config)}


def _stages(config: Config) -> StageSettings:
    return StageSettings(config.model.num_layers, config.parallel.pp, config.parallel.vpp)


def batch_splits_over_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    replicas = data_parallel_size(config, world_size)
    if replicas is None or batch % ((micro or 1) * replicas) == 0:
        return
    if micro is None:
        fewer = gcd(batch, replicas) * world_size // replicas
        remedy = f"train.global_batch_size={around(batch, replicas)}, or {fewer} processes"
        yield Problem("train.global_batch_size", batch, f"not a multiple of the {replicas} data-parallel ranks", remedy)
        return
    works = [f"train.global_batch_size={around(batch, micro * replicas)}"]
    if batch % replicas == 0:
        works.append(f"train.micro_batch_size={either(divisors_near(batch // replicas, micro))}")
    elif batch % micro == 0 and (fewer := gcd(batch // micro, replicas)) < replicas:
        works.append(f"a number of processes like {fewer * world_size // replicas}")
    yield Problem(
        "train.global_batch_size",
        batch,
        f"not a multiple of train.micro_batch_size={micro} x {replicas} data-parallel ranks = {micro * replicas}",
        ", or ".join(works),
    )


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


PARALLEL_RULES = (
    parallel_sizes_are_built,
    world_splits_into_the_layout,
    layers_split_over_stages,
    nccl_options_can_be_read,
)
