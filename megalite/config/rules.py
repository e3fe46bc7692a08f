"""Every rule that a config must keep; `bounds.py` has those of single settings, here are those that join several.

Each rule is a small generator of `Problem`s that names the settings it read, with their numbers, and values that would
work. A rule whose text names a setting that is already refused stays silent: it would judge a value nobody asked for.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from math import gcd
from pathlib import Path

from megalite.config.advice import around, divisors_near, either
from megalite.config.bounds import bounds, with_defaults
from megalite.config.derive import absolute, derive_model, looks_like_path
from megalite.config.parallel_rules import PARALLEL_RULES, data_parallel_size
from megalite.config.problems import Problem
from megalite.config.schema import Config
from megalite.config.suggest import nearest

Rule = Callable[[Config, int], Iterator[Problem]]

BUILT_IN_TOKENIZERS = ("bpe", "byte", "char")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check(config: Config, world_size: int, doubtful: Collection[str] = ()) -> list[Problem]:
    """All problems of a config on `world_size` ranks. `doubtful` settings were refused before they entered it."""
    problems = list(bounds(config))
    refused = set(doubtful) | {problem.setting for problem in problems}
    judged = with_defaults(config, {problem.setting for problem in problems})
    found = (problem for rule in RULES for problem in rule(judged, world_size))
    return problems + [problem for problem in found if not any(_names(problem, name) for name in refused)]


def _names(problem: Problem, name: str) -> bool:
    """Whether a problem speaks of the setting, or of any setting of the group, called `name`."""
    return bool(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", f"{problem.setting} {problem.rule}"))


# --- model ---------------------------------------------------------------------------------------------------------


def hidden_splits_over_heads(config: Config, world_size: int) -> Iterator[Problem]:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    unit = 2 if config.model.position == "rope" else 1  # rotary heads are even
    if config.model.head_size is None and hidden % heads:
        divisors = [] if hidden % unit else divisors_near(hidden // unit, heads)
        fewer = f"model.num_attention_heads={either(divisors)}, or " if divisors else ""
        yield Problem(
            "model.hidden_size",
            hidden,
            f"does not split over model.num_attention_heads={heads}",
            f"model.hidden_size={around(hidden, unit * heads)}, or {fewer}set model.head_size",
        )


def query_heads_split_over_key_value_heads(config: Config, world_size: int) -> Iterator[Problem]:
    heads, groups = config.model.num_attention_heads, config.model.num_key_value_heads
    if groups is not None and heads % groups:
        yield Problem(
            "model.num_key_value_heads",
            groups,
            f"model.num_attention_heads={heads} is not a multiple of it",
            f"model.num_key_value_heads={either(divisors_near(heads, groups))}",
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


# --- training ------------------------------------------------------------------------------------------------------


def batch_splits_over_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    replicas = data_parallel_size(config, world_size)
    if replicas is None or batch % ((micro or 1) * replicas) == 0:
        return
    if micro is None:
        remedy = f"train.global_batch_size={around(batch, replicas)}, or {gcd(batch, replicas)} processes"
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


def schedule_fits_the_steps(config: Config, world_size: int) -> Iterator[Problem]:
    steps, warmup, decay = config.train.steps, config.lr.warmup_steps, config.lr.decay_steps
    if warmup is not None and warmup > steps:
        yield Problem(
            "lr.warmup_steps",
            warmup,
            f"the warm-up is longer than the run, train.steps={steps}",
            f"lr.warmup_steps={min(100, steps // 10)} (the default for this run), or train.steps={warmup} or more",
        )
    elif config.lr.schedule == "wsd" and decay is not None and (warmup or 0) + decay > steps:
        yield Problem(
            "lr.decay_steps",
            decay,
            f"with lr.warmup_steps={warmup or 0} it is longer than the run, train.steps={steps}",
            f"lr.decay_steps={min(steps // 5, steps - (warmup or 0))}, or train.steps={(warmup or 0) + decay} or more",
        )


def learning_rate_falls(config: Config, world_size: int) -> Iterator[Problem]:
    peak, end = config.optimizer.lr, config.lr.min_lr
    if end is not None and end > peak:
        yield Problem(
            "lr.min_lr",
            end,
            f"above the peak, optimizer.lr={peak:g}",
            f"lr.min_lr={peak / 10:g}, or a larger optimizer.lr",
        )


def betas_are_two_decay_rates(config: Config, world_size: int) -> Iterator[Problem]:
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "optimizer.betas", betas, "must be two numbers, each at least 0 and below 1", "optimizer.betas=[0.9,0.95]"
        )


# --- data and tokenizer --------------------------------------------------------------------------------------------


def data_path_suits_the_source(config: Config, world_size: int) -> Iterator[Problem]:
    source, path = config.data.source, config.data.path
    examples = {"text": "data.path=book.txt", "hf": "data.path=roneneldan/TinyStories", "tokens": "data.path=corpus"}
    parts = path if isinstance(path, list) else [path]
    if source == "stdlib":
        if path is not None:
            yield Problem(
                "data.path", path, "data=stdlib reads Python's own source and takes no path", "data=text for files"
            )
    elif path is None or path == []:
        yield Problem("data.path", path, f"data={source} needs to be told what to read", examples[source])
    elif not all(isinstance(part, str | int) and not isinstance(part, bool) and str(part).strip() for part in parts):
        yield Problem(
            "data.path", path, "must be text or a list of texts", f"{examples[source]} or data.path=[one,two]"
        )


def weights_suit_the_blend(config: Config, world_size: int) -> Iterator[Problem]:
    weights, path = config.data.weights, config.data.path
    if weights is None:
        return
    parts = len(path) if isinstance(path, list) else 1
    if parts < 2:
        yield Problem("data.weights", weights, "only a data.path of several parts has shares", "leave data.weights out")
    elif len(weights) != parts:
        yield Problem(
            "data.weights",
            weights,
            f"{len(weights)} shares for the {parts} parts of data.path",
            f"{parts} numbers, one for each part, in the same order",
        )
    if any(weight <= 0 for weight in weights):
        remedy = "positive numbers like data.weights=[0.7,0.3]; leave out the path of a part that is not wanted"
        yield Problem("data.weights", weights, "shares must be above 0", remedy)


def vocabulary_holds_the_tokens(config: Config, world_size: int) -> Iterator[Problem]:
    size, trained = config.model.vocab_size, config.data.bpe_vocab_size
    if config.tokenizer == "bpe" and config.data.source != "tokens" and size is not None and size < trained:
        yield Problem(
            "model.vocab_size",
            size,
            f"smaller than the vocabulary that is trained on the data, data.bpe_vocab_size={trained}",
            f"model.vocab_size=null (the tokenizer's), or data.bpe_vocab_size={size}"
            + ("" if size >= 258 else " is below 258, so rather tokenizer=char"),
        )


def tokenizer_exists(config: Config, world_size: int) -> Iterator[Problem]:
    name = config.tokenizer
    folder = Path(absolute(name))
    near = nearest(name, BUILT_IN_TOKENIZERS)
    hint = f"tokenizer={near}, or " if near else ""
    if name in BUILT_IN_TOKENIZERS or (name and folder.is_dir()):
        return
    if looks_like_path(name):
        yield Problem(
            "tokenizer", name, f"there is no folder {folder}", "the folder of a transformers tokenizer", here=True
        )
    elif not HUB_NAME.fullmatch(name):
        yield Problem(
            "tokenizer",
            name,
            "neither built in, nor a folder, nor the form of a hub name",
            f"{hint}one of {', '.join(BUILT_IN_TOKENIZERS)}, a folder, or a name like gpt2 or owner/name",
        )


# --- folders -------------------------------------------------------------------------------------------------------


def start_weights_exist(config: Config, world_size: int) -> Iterator[Problem]:
    source = config.checkpoint.init_from
    if source is not None and not Path(absolute(source), "config.json").is_file():
        missing = "holds no config.json" if Path(absolute(source)).is_dir() else "does not exist"
        yield Problem(
            "checkpoint.init_from",
            source,
            f"the folder {absolute(source)} {missing}",
            "a folder written by transformers' save_pretrained, with config.json and model.safetensors",
            here=True,
        )


def run_dir_can_be_written(config: Config, world_size: int) -> Iterator[Problem]:
    if config.run_dir is None:
        return
    folder = Path(absolute(config.run_dir))
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not existing.is_dir():
        yield Problem(
            "run_dir",
            config.run_dir,
            f"{existing} is not a folder",
            "a new folder, or that of a run to continue",
            here=True,
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(
            "run_dir",
            config.run_dir,
            f"{existing} is not writable for this user",
            "a folder you may write to",
            here=True,
        )


RULES: tuple[Rule, ...] = (
    hidden_splits_over_heads,
    query_heads_split_over_key_value_heads,
    rotary_heads_are_even,
    sequence_fits_learned_positions,
    rotary_scaling_band_is_ordered,
    model_name_is_a_file_name,
    batch_splits_over_ranks,
    schedule_fits_the_steps,
    learning_rate_falls,
    betas_are_two_decay_rates,
    *PARALLEL_RULES,
    data_path_suits_the_source,
    weights_suit_the_blend,
    vocabulary_holds_the_tokens,
    tokenizer_exists,
    start_weights_exist,
    run_dir_can_be_written,
)
