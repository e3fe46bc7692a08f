"""The rules that join settings of the model, whatever the layout; rules.py says what a rule is."""

import re
from collections.abc import Iterator

from megalite.config.derive import derive_model
from megalite.config.schema import Config
from megalite.errors.problems import Problem
from megalite.errors.remedies import around, divisors, divisors_near, either, nearest_of


def hidden_splits_over_heads(config: Config, world_size: int) -> Iterator[Problem]:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    unit = 2 if config.model.position == "rope" else 1  # rotary heads are even
    if config.model.head_size is None and hidden % heads:
        fits = [] if hidden % unit else divisors_near(hidden // unit, heads)
        fewer = f"model.num_attention_heads={either(fits)}, or " if fits else ""
        yield Problem(
            "model.hidden_size",
            hidden,
            f"does not split over model.num_attention_heads={heads}",
            f"model.hidden_size={around(hidden, unit * heads)}, or {fewer}set model.head_size",
        )


def query_heads_split_over_key_value_heads(config: Config, world_size: int) -> Iterator[Problem]:
    heads, groups = config.model.num_attention_heads, config.model.num_key_value_heads
    if groups is not None and heads % groups:
        tp = config.parallel.tp
        fits = [size for size in divisors(heads) if size % tp == 0 or tp % size == 0]  # 1 does
        yield Problem(
            "model.num_key_value_heads",
            groups,
            f"model.num_attention_heads={heads} is not a multiple of it",
            f"model.num_key_value_heads={either(nearest_of(fits, groups))}",
        )


def rotary_heads_are_even(config: Config, world_size: int) -> Iterator[Problem]:
    model = config.model
    if model.position != "rope" or (model.head_size is None and model.hidden_size % model.num_attention_heads):
        return
    size = derive_model(model, config.train.seq_length).head_size
    assert size is not None
    if size % 2 and model.head_size is not None:
        yield Problem(
            "model.head_size",
            size,
            "model.position=rope turns pairs of numbers, so it must be even",
            f"model.head_size={around(size, 2)}, or model.position=learned",
        )
    elif size % 2:
        heads = model.num_attention_heads
        yield Problem(
            "model.hidden_size",
            model.hidden_size,
            f"over model.num_attention_heads={heads} it gives heads of odd size {size}, and model.position=rope turns "
            "pairs of numbers",
            f"model.hidden_size={around(model.hidden_size, 2 * heads)}, or set an even model.head_size",
        )


def sequence_fits_learned_positions(config: Config, world_size: int) -> Iterator[Problem]:
    length, positions = config.train.seq_length, config.model.max_positions
    if config.model.position == "learned" and positions is not None and length > positions:
        yield Problem(
            "train.seq_length",
            length,
            f"longer than the table of learned positions, model.max_positions={positions}",
            f"train.seq_length={positions} or less, or model.max_positions={length}, or model.position=rope",
        )


def rotary_scaling_band_is_ordered(config: Config, world_size: int) -> Iterator[Problem]:
    model = config.model
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if model.position == "rope" and model.rope_scaling_factor > 1 and high <= low:
        yield Problem(
            "model.rope_high_frequency_factor",
            high,
            f"must be above model.rope_low_frequency_factor={low:g} where model.rope_scaling_factor is above 1",
            "Llama 3.1 has 1 and 4",
        )


def model_name_is_a_file_name(config: Config, world_size: int) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", config.model.name):
        yield Problem(
            "model.name",
            config.model.name,
            "part of the run folder's name, so letters, digits, '.', '_' and '-' only, a letter or digit first",
            "model.name=my_model",
        )


MODEL_RULES = (
    hidden_splits_over_heads,
    query_heads_split_over_key_value_heads,
    rotary_heads_are_even,
    sequence_fits_learned_positions,
    rotary_scaling_band_is_ordered,
    model_name_is_a_file_name,
)
