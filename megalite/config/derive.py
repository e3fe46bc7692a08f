"""Fills in every setting that follows from others, where the command leaves it open.

Pure functions of the config, the launch folder and (for the cache) the environment, so every rank derives the same.
The vocabulary waits for the tokenizer, and what depends on the device waits for the start. A field whose type has None
may stay open: it has no meaning in that run, or its reader decides (`optimizer.bucket_size`).
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from pathlib import PurePath
from typing import Any

from megalite.config.files import absolute
from megalite.config.layout import dense_ranks
from megalite.config.schedule_request import CHUNKED, SPLITTING, ScheduleRequest
from megalite.config.schema import Config, ModelConfig, MoEConfig, ParallelConfig
from megalite.config.settings import OPEN, SETTINGS, value_of, with_values
from megalite.config.step_plan import batch_sizes, known_steps, warmup_and_decay
from megalite.errors.problems import plain

USUAL = 8  # sequences of a microbatch, at most, where no memory is measured
FILLING = 8  # microbatches that a pipeline has by default, at least: of two stages the first and last idle for a ninth
LONGEST_NAME, SETTINGS_SHOWN, LONGEST_SETTING = 100, 4, 24  # of a run's name, and what it shows
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._=+-]{{0,{LONGEST_NAME - 1}}}")  # a folder of that name works everywhere
BUILT_IN_TOKENIZERS = ("bpe", "byte", "char")

# The settings that define a training: those of model, data, optimizer and lr, without places and ways to compute.
TRAINING = {
    *(name for name, setting in SETTINGS.items() if setting.group in ("model", "data", "optimizer", "lr")),
    *("train.global_batch_size", "train.batch_ramp", "train.seq_length", "train.label_smoothing", "train.z_loss"),
    *("seed", "tokenizer", "checkpoint.init_from", "phases"),
} - {
    *("model.name", "model.loss_chunk_tokens", "model.moe.dispatcher"),
    *("data.cache_dir", "data.workers", "data.streaming", "data.validation"),
    *(f"optimizer.{name}" for name in ("zero", "instances", "bucket_size", "overlap", "ownership", "may_change")),
    *("optimizer.communication_dtype", "optimizer.initial_loss_scale", "optimizer.min_loss_scale"),
    *("optimizer.loss_scale_window", "optimizer.hysteresis"),
}
# Settings of later versions, whose defaults leave the names of older runs as they are.
LATER_ONES = (
    *("optimizer.name", "optimizer.groups", "optimizer.ema_", "optimizer.muon.", "optimizer.qk_clip"),
    *("model.mup_base_", "optimizer.weight_decay_schedule", "optimizer.cautious", "phases"),
    *("lr.table", "lr.steps", "lr.warmup_tokens", "lr.decay_tokens"),
)
LATER = {name for name in SETTINGS if name.startswith(LATER_ONES)}


def derive(config: Config, world_size: int = 1) -> Config:
    """A new config with the derived values filled in and all paths absolute. Deriving twice changes nothing."""
    axes, train, resolved = config.parallel, config.train, _resolved(config)
    request, folder = schedule_request(config, world_size), run_dir_of(resolved)
    grouped = request.schedule in CHUNKED and train.batch_ramp is None  # else groups grow with batches
    derived = config.derived or tuple(name for name in SETTINGS if value_of(config, name) in OPEN)
    values = {
        "parallel.microbatch_group_size": request.group if grouped else None,
        "train.micro_batch_size": derive_micro_batch_size(config, world_size),
        "optimizer.communication_dtype": config.optimizer.gradient_dtype,
        "lr.min_lr": config.optimizer.lr / 10,
        "run_name": os.path.basename(folder),
    }
    places = {"run_dir": folder, "parallel.nccl_options": axes.nccl_options and absolute(axes.nccl_options)}
    filled = replace(with_values(_filled(resolved, values), places), derived=derived)
    return filled if filled.train.steps is None else derive_lengths(filled, filled.train.steps)


def derive_lengths(config: Config, steps: int) -> Config:
    """A copy of a derived config with this number of steps, and what follows from it."""
    warmup, decay = warmup_and_decay(config, steps)
    span = steps if "lr.steps" in config.derived else config.lr.steps
    warmup, decay = (min(100, steps // 10) if warmup is None else warmup), (span // 5 if decay is None else decay)
    values = {"train.steps": steps, "lr.steps": span, "lr.warmup_steps": warmup, "lr.decay_steps": decay}
    return with_values(config, values)


def derive_sizes(config: Config) -> Config:
    """A copy in which the sizes of model and layout are written out, the steps where the settings tell them, and what
    follows from the pipeline's schedule."""
    axes, model = config.parallel, derive_model(config.model, config.train.seq_length)
    values = {
        "train.steps": known_steps(config.train),
        "parallel.etp": axes.tp,
        "parallel.sequence_parallel": axes.tp > 1,
        "parallel.schedule": derive_schedule(axes),
        "train.compile": False if derive_schedule(axes) in SPLITTING else None,  # None: by the device
    }
    return _filled(replace(config, model=model), values)


def derive_model(model: ModelConfig, seq_length: int) -> ModelConfig:
    """The model's shape with every size written out, except the vocabulary. A dense model keeps nothing that a preset
    says of experts."""
    width, heads = model.hidden_size, model.num_attention_heads
    values = {
        "model.num_key_value_heads": heads,
        "model.head_size": width // heads,
        "model.ffn_hidden_size": -(-8 * width // (3 * 64)) * 64 if model.gated else 4 * width,
        "model.max_positions": seq_length if model.position == "learned" else None,
        "model.attention_dropout": model.dropout,
        "model.embedding_dropout": model.dropout,
    }
    config = _filled(Config(model=model), values)
    if not model.moe.num_experts:
        return replace(config.model, moe=MoEConfig())
    return _filled(config, {"model.moe.ffn_hidden_size": config.model.ffn_hidden_size}).model


def derive_vocabulary(config: Config, vocab_size: int) -> Config:
    """A new config whose model knows the tokenizer's vocabulary, unless the user set a (larger) one."""
    return _filled(config, {"model.vocab_size": vocab_size})


def _filled(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy in which the settings that were null have these values."""
    return with_values(config, {name: value for name, value in values.items() if value_of(config, name) is None})


def derive_schedule(parallel: ParallelConfig) -> str:
    """The pipeline's schedule: the setting, else interleaved where a rank has several chunks of layers, else 1f1b."""
    return parallel.schedule or ("interleaved" if parallel.vpp > 1 else "1f1b")


def derive_micro_batch_size(config: Config, world_size: int) -> int:
    """The micro-batch size: the setting, else the largest that suits, up to 8. A run on GPUs takes what fits
    (plan/gpu_memory.py)."""
    return config.train.micro_batch_size or max(size for size in micro_batch_sizes(config, world_size) if size <= USUAL)


def micro_batch_sizes(config: Config, world_size: int) -> list[int]:
    """The micro-batch sizes that suit, ascending: divisors of a data-parallel rank's share of every global batch that
    leave a pipeline a microbatch for each rank (or group), and 8 at full size. Above 8 powers of two alone."""
    shares = [max(1, sequences * dense_ranks(config) // world_size) for sequences in batch_sizes(config.train)]
    pp, group = config.parallel.pp, "parallel.microbatch_group_size"
    asked = 1 if group in config.derived else value_of(config, group) or 1  # else it follows from the size
    most = min(shares[0] // max(pp, asked), shares[-1] // FILLING if pp > 1 else shares[-1])
    tried, common = {*range(1, USUAL + 1), *(1 << power for power in range(32))}, gcd(*shares)
    return sorted(size for size in tried if size <= max(1, most) and common % size == 0)


def schedule_request(config: Config, world_size: int) -> ScheduleRequest:
    """The schedule that the config asks for; with pp microbatches, which suit any, where batch or layout do not fit."""
    axes, schedule, batch = config.parallel, derive_schedule(config.parallel), config.train.global_batch_size
    dp, rest = divmod(world_size, dense_ranks(config))
    sequences = derive_micro_batch_size(config, world_size) * dp
    if rest or batch % sequences:
        group_size = None if schedule in CHUNKED else axes.microbatch_group_size
        return ScheduleRequest(schedule, axes.pp, axes.pp, axes.vpp, group_size)
    return ScheduleRequest(schedule, axes.pp, batch // sequences, axes.vpp, axes.microbatch_group_size)


def run_dir_of(config: Config) -> str:
    """The run's folder: the setting, else runs/<run_name> in the launch folder."""
    return absolute(config.run_dir or os.path.join("runs", config.run_name or default_run_name(config)))


def default_run_name(config: Config) -> str:
    """`<model>-<data>-<settings of the command>-<hash>`; the hash covers what defines the training and nothing else, so
    the same training goes on in the same folder wherever it runs. A learning rate's schedule enters as it was given: a
    derived warm-up follows the number of steps.
    """
    resolved, dense = _resolved(config), not config.model.moe.num_experts
    left = {name for name in LATER if value_of(config, name) == SETTINGS[name].default}
    names = [name for name in TRAINING if name not in left and not (dense and name.startswith("model.moe."))]
    definition = json.dumps({name: value_of(resolved, name) for name in names}, sort_keys=True, default=str)
    digest = hashlib.sha256(definition.encode()).hexdigest()[:8]
    departures = (_in_one_word(name, value_of(config, name)) for name in config.departures if name in TRAINING)
    words = [word for word in departures if word][:SETTINGS_SHOWN]
    while len(name := "-".join([config.model.name, config.data.source, *words, digest])) > LONGEST_NAME and words:
        words.pop()
    return name


def _in_one_word(name: str, value: Any) -> str:
    """A setting in a run's name: `lr3e-4`, `num_layers12`, `rmsnorm`, `no_bias`, the last part of a path."""
    leaf = SETTINGS[name].leaf
    if isinstance(value, bool) or value is None:
        word = leaf if value else f"no_{leaf}"
    elif isinstance(value, str):
        word = PurePath(value).stem
    else:
        word = leaf + "_".join(map(plain, value if isinstance(value, list) else [value]))
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", word).strip("_.-")[:LONGEST_SETTING]


def looks_like_path(name: str) -> bool:
    """Whether a tokenizer's name can only be a folder: hub names are `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1


def absolute_paths(path: Any, source: str) -> Any:
    """data.path or data.validation with absolute paths; names at the hub stay as they are."""
    if isinstance(path, list):
        return [absolute_paths(part, source) for part in path]
    if isinstance(path, dict):
        return {name: absolute_paths(part, source) for name, part in path.items()}
    return path if path is None else str(path) if source == "hf" else absolute(str(path))


def _resolved(config: Config) -> Config:
    """A copy in which sizes and absolute paths are written out."""
    data, tokenizer = config.data, config.tokenizer
    path, sets = (absolute_paths(paths, data.source) for paths in (data.path, data.validation))
    if looks_like_path(tokenizer) or os.path.isdir(os.path.expanduser(tokenizer)):
        tokenizer = absolute(tokenizer)
    cache = data.cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "megalite")
    start = config.checkpoint.init_from and absolute(config.checkpoint.init_from)
    places = {"data.path": path, "data.cache_dir": absolute(cache), "checkpoint.init_from": start}
    places["data.validation"] = sets
    return with_values(derive_sizes(config), {"tokenizer": tokenizer, **places})
