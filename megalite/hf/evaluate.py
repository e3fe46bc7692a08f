"""A saved model on data: loss, perplexity, bits per byte.

On a run's own validation part these are the figures of its training: the same batches, the same sums. Other data is
evaluated whole, in windows that follow each other without overlap: of each of its files, every token but the first is
predicted once.
"""

import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from megalite.config.compose import load_part, names_of
from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.data.batches import read_batch, validation_batches, validation_samples
from megalite.data.open import OpenedData, TokenFiles, open_data
from megalite.data.samples import SampleSource
from megalite.errors.problems import NO_VALUE, Problem, UserError, refuse
from megalite.hf.saved_model import SavedModel, open_model
from megalite.launch.device import choose_device, choose_precision, name_of
from megalite.launch.environment import read_environment
from megalite.train.evaluate import Sums

READ = ("data", "data.*", "device", "precision", "train.seq_length", "train.eval_batches")
NAME_DATA = "name the data to evaluate on: data=stdlib, or data=text data.path=FILE"

Prepare = Callable[[Config], TokenFiles]  # makes the token files that a config needs


@dataclass(frozen=True)
class Evaluation:
    """`loss` is the mean over `tokens` predicted tokens, in nats. None: the text's bytes are not known."""

    model: str
    step: int | None
    data: str
    tokens: int
    seq_length: int
    precision: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    bytes_per_token: float | None


class Work(NamedTuple):
    """What is computed: batches of the opened data, which predict at most `tokens` tokens."""

    config: Config
    opened: OpenedData
    batches: Iterator[Batch]
    tokens: int
    description: str


@torch.no_grad()
def evaluate_saved(
    folder: Path,
    words: Sequence[str],
    prepare: Prepare,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
    *,
    step: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
) -> Evaluation:
    """The model in `folder`, a run's (its newest checkpoint, or that of `step`) or one of transformers, on the data.

    `words` are overrides, as the training command takes them. Where they name no data, a run is evaluated on what it
    held out; of other data, at most `max_tokens` tokens, `batch_size` sequences at a time. `report` is told of damaged
    checkpoints that were passed over, `progress` how many tokens of how many are done.
    """
    config, named = load_part(words, "an evaluation", READ), names_of(words)
    own_data = not any(name.partition(".")[0] == "data" for name in named)
    idle = [name for name in named if name == ("train.seq_length" if own_data else "train.eval_batches")]
    idle += ["--max-tokens"] if own_data and max_tokens is not None else []
    rule = "has no effect: a run's own validation part is evaluated as in training, other data whole"
    refuse([Problem(name, NO_VALUE, rule, NAME_DATA if own_data else "--max-tokens N") for name in idle])
    saved = open_model(folder, report, step)
    device = choose_device(config.device, read_environment(os.environ))
    precision = config.precision if saved.run is None or "precision" in named else saved.run.config.precision
    dtype = choose_precision(precision, device)
    if own_data:
        work = _own_data(saved, config.train.eval_batches if "train.eval_batches" in named else None, prepare)
    else:
        work = _other_data(saved, config, named, batch_size, max_tokens, prepare)
    model = saved.load(work.config, dtype, device)
    one = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    sums, done = Sums(work.opened.bytes_of_ids, device), 0
    for batch in work.batches:
        batch = batch.to(device)
        sums.add(model.loss(batch, one), [batch])
        done = min(done + batch.labels.numel(), work.tokens)
        progress(done, work.tokens)
    found, step, length = sums.metrics(), saved.run.found.step if saved.run else None, work.config.train.seq_length
    about = (str(folder), step, work.description, found.tokens, length, name_of(dtype))
    bytes_per_token = found.bytes / found.tokens if found.bytes else None
    return Evaluation(*about, found.loss, found.perplexity, found.bits_per_byte, bytes_per_token)


def _own_data(saved: SavedModel, eval_batches: int | None, prepare: Prepare) -> Work:
    """The very batches of an evaluation during training, on the data that the run held out."""
    if saved.run is None:
        raise UserError(Problem("data", None, "a model of transformers has no data of its own", NAME_DATA))
    train = replace(saved.run.config.train, eval_interval=saved.run.config.train.eval_interval or 1)
    config = replace(saved.run.config, train=replace(train, eval_batches=eval_batches or train.eval_batches))
    opened, known = open_data(config, prepare(config)), saved.run.state.data
    if opened.fingerprint != known.fingerprint:
        rule = f"it is not the data of the run any more: {opened.description} now, {known.description} then"
        raise UserError(Problem("data", config.data.path, rule, NAME_DATA))
    if (source := opened.validation) is None:
        rule = "the run holds out nothing for validation"
        raise UserError(Problem("data.validation_fraction", config.data.validation_fraction, rule, NAME_DATA))
    steps = validation_batches(source, config, dp_rank=0, dp_size=1, device=torch.device("cpu"))
    tokens = validation_samples(source, config) * train.seq_length
    return Work(config, opened, chain.from_iterable(steps), tokens, f"the validation part of {opened.description}")


def _other_data(
    saved: SavedModel, asked: Config, named: Set[str], rows: int, max_tokens: int | None, prepare: Prepare
) -> Work:
    """All of the data that the overrides name, or its first `max_tokens` tokens, in `rows` windows at a time.

    It is read with the model's tokenizer, and with the run's own customs where the user does not say. Nothing is held
    out unless the user says so.
    """
    seq_length = asked.train.seq_length if "train.seq_length" in named else saved.seq_length
    positions = saved.config.max_positions
    if saved.config.position == "learned" and positions is not None and seq_length > positions:
        rule = f"the model has {positions:,} positions"
        raise UserError(Problem("train.seq_length", seq_length, rule, f"at most {positions}, or leave it out"))
    if saved.tokenizer_folder is None and asked.data.source != "tokens":
        rule = "the folder holds no tokenizer, so there is nothing to encode text with"
        raise UserError(Problem("model", str(saved.folder), rule, "put its tokenizer there, or data=tokens"))
    held_out = asked.data.validation_fraction if "data.validation_fraction" in named else 0.0
    data = replace(asked.data, validation_fraction=held_out)
    if saved.run is not None:
        customs = {"mask_end_of_document", "cross_document_attention"} - {name.removeprefix("data.") for name in named}
        data = replace(data, **{name: getattr(saved.run.config.data, name) for name in customs})
    train = replace(asked.train, seq_length=1, eval_interval=int(held_out > 0))  # opens any text
    tokenizer = "byte" if saved.tokenizer_folder is None else str(saved.tokenizer_folder.absolute())
    config = replace(asked, data=data, model=saved.config, tokenizer=tokenizer, train=train)
    opened = open_data(config, prepare(config))
    config = replace(config, train=replace(train, seq_length=seq_length))
    source = replace(opened.validation or opened.train, weights=(1,), seq_length=seq_length, seed=None)
    there = sum(max(0, part.tokens - 1) for part in source.parts)
    tokens = min(there, max_tokens or there)
    description = opened.description + (", the part held out" if opened.validation else "")
    return Work(config, opened, _windows(source, config, rows, tokens), tokens, description)


def _windows(source: SampleSource, config: Config, rows: int, left: int) -> Iterator[Batch]:
    """Batches that predict the first `left` tokens: of each part `rows` windows at a time, then a shorter one."""
    for part in source.parts:
        part = replace(part, stop=part.first + min(part.tokens, left + 1))  # the first is not predicted
        left -= max(0, part.tokens - 1)
        count = part.samples(source.seq_length)
        for first in range(0, count, rows):
            yield read_batch(replace(source, parts=[part]), first, min(rows, count - first), config)
        rest = replace(part, first=part.first + count * source.seq_length)
        if rest.tokens > 1:
            yield read_batch(replace(source, parts=[rest], seq_length=rest.tokens - 1), 0, 1, config)
