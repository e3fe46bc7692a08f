"""The rules that join the layout with the world and with the model's sizes; rules.py says what a rule is."""

import re
from collections.abc import Iterator
from pathlib import Path

from megalite.config.advice import around, divisors_near, either
from megalite.config.derive import absolute, derive_model
from megalite.config.problems import Problem, UserError
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS
from megalite.parallel.layout_rules import LayoutRequest, divisors, layout_problems, pipeline_sizes
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


def layers_split_over_tensor_parallel_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    tp, model = config.parallel.tp, config.model
    if tp == 1 or model.num_attention_heads % (model.num_key_value_heads or 1):
        return
    derived = derive_model(model, config.train.seq_length)
    groups, ffn = derived.num_key_value_heads, derived.ffn_hidden_size
    assert groups is not None
    assert ffn is not None
    if model.num_attention_heads % tp:
        remedy = _or_change("parallel.tp", model.num_attention_heads, tp, "model.num_attention_heads")
        yield Problem(
            "model.num_attention_heads", model.num_attention_heads, f"does not split over parallel.tp={tp}", remedy
        )
    elif groups % tp and tp % groups:
        fits = [size for size in divisors(model.num_attention_heads) if groups % size == 0 or size % groups == 0]
        rule = f"neither a multiple nor a divisor of parallel.tp={tp}"
        yield Problem("model.num_key_value_heads", groups, rule, f"parallel.tp={either(fits)}")
    if ffn % tp:
        name = "model.ffn_hidden_size"
        yield Problem(name, ffn, f"does not split over parallel.tp={tp}", _or_change("parallel.tp", ffn, tp, name))


def sequence_splits_over_tensor_parallel_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    tp, length = config.parallel.tp, config.train.seq_length
    if config.parallel.sequence_parallel and tp == 1:
        rule = "there is nothing to split it over with parallel.tp=1"
        yield Problem("parallel.sequence_parallel", True, rule, "leave it out, or parallel.tp=2 or more")
    elif tp > 1 and config.parallel.sequence_parallel is not False and length % tp:
        remedy = _or_change("parallel.tp", length, tp, "train.seq_length")
        rule = f"does not split over parallel.tp={tp} with sequence parallelism"
        yield Problem("train.seq_length", length, rule, f"{remedy}, or parallel.sequence_parallel=false")


def vocabulary_reaches_every_tensor_parallel_rank(config: Config, world_size: int) -> Iterator[Problem]:
    tp, multiple = config.parallel.tp, config.model.vocab_multiple
    if tp > multiple:
        rule = (
            f"below parallel.tp={tp}: a small vocabulary, padded to a multiple of it, might leave a rank without rows"
        )
        yield Problem("model.vocab_multiple", multiple, rule, f"model.vocab_multiple={tp} or more")


def _or_change(axis: str, size: int, wanted: int, name: str) -> str:
    """Divisors of a size that does not split, and sizes that would."""
    return f"{axis}={either(divisors_near(size, wanted))}, or {name}={around(size, wanted)}"


def world_splits_into_the_layout(config: Config, world_size: int) -> Iterator[Problem]:
    def stages_accept(changed: LayoutRequest) -> bool:
        then = StageSettings(config.model.num_layers, changed.pp, changed.vpp)
        return changed.pp == 1 or broken_rules(then) <= broken_rules(_stages(config))

    yield from layout_problems(layout_request(config, world_size), parallel_setting, stages_accept)


def layers_split_over_stages(config: Config, world_size: int) -> Iterator[Problem]:
    names = {"num_layers": "model.num_layers", "pp": "parallel.pp", "vpp": "parallel.vpp"}
    if config.parallel.pp > 1:  # else it is one stage, and the layout's rules speak about vpp
        yield from stage_problems(_stages(config), names, pipeline_sizes(layout_request(config, world_size)))


def _stages(config: Config) -> StageSettings:
    return StageSettings(config.model.num_layers, config.parallel.pp, config.parallel.vpp)


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
    layers_split_over_tensor_parallel_ranks,
    sequence_splits_over_tensor_parallel_ranks,
    vocabulary_reaches_every_tensor_parallel_rank,
    world_splits_into_the_layout,
    layers_split_over_stages,
    nccl_options_can_be_read,
)
