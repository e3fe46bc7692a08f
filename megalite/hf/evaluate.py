"""A saved model on data: loss, perplexity, bits per byte.

On a run's own validation part these are the figures of its training: the same batches, the same sums. Other data is
evaluated whole, in windows that follow each other without overlap: of each of its files, every token but the first is
predicted once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from megalite.config.compose import load_part, names_of
from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.data.batches import read_batch, validation_batches, validation_samples
from megalite.data.open import OpenedData, Preparation, open_data
from megalite.data.samples import Part, SampleSource
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect
from megalite.hf.saved_model import SavedModel, open_model
from megalite.launch.device import choose_device, choose_precision, name_of
from megalite.launch.environment import read_environment
from megalite.train.evaluate import Sums

READ = ("data", "data.*", "device", "precision", "train.seq_length", "train.eval_batches")
NAME_DATA = "name the data to evaluate on: data=stdlib, or data=text data.path=FILE"


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


@dataclass(frozen=True)
class Request:
    """`config` is that of the overrides over the defaults; `named` are the settings that the user gave."""

    config: Config
    named: frozenset[str]
    batch_size: int  # sequences at a time
    max_tokens: int | None  # None: all there are
    own_data: bool  # what the run held out: no other data is named


class Work(NamedTuple):
    """What is computed: batches of the opened data, which predict at most `tokens` tokens."""

    config: Config
    opened: OpenedData
    batches: Iterator[Batch]
    tokens: int
    description: str


def read_request(words: Sequence[str], *, batch_size: int = 8, max_tokens: int | None = None) -> Request:
    """`words` are overrides, as the training command takes them. UserError with all that is wrong."""
    named = names_of(words)
    own_data = not any(name.partition(".")[0] == "data" for name in named)
    problems = [
        Problem(name, value, "must be at least 1", f"leave it out, or {name} 8")
        for name, value in (("--batch-size", batch_size), ("--max-tokens", max_tokens))
        if value is not None and value < 1
    ]
    if own_data and (max_tokens is not None or "train.seq_length" in named):
        rule = "the run's own validation part is evaluated as in training"
        remedy = "train.eval_batches=N for more or less of it, or name data: data=text data.path=FILE"
        problems.append(Problem("--max-tokens and train.seq_length", NO_VALUE, rule, remedy))
    if not own_data and "train.eval_batches" in named:
        rule = "is for the validation part of a run; other data is evaluated whole"
        problems.append(Problem("train.eval_batches", NO_VALUE, rule, "--max-tokens N"))
    config = collect(lambda: load_part(words, "an evaluation", READ), problems)
    if problems or config is None:
        raise UserError(problems)
    return Request(config, named, batch_size, max_tokens, own_data)


@torch.no_grad()
def evaluate_saved(
    folder: Path,
    request: Request,
    preparation: Preparation,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
    step: int | None = None,
) -> Evaluation:
    """The model in `folder`, a run's (its newest checkpoint, or that of `step`) or one of transformers, on the data.

    `report` is told of damaged checkpoints that were passed over, `progress` how many tokens of how many are done.
    UserError for whatever does not fit together.
    """
    saved = open_model(folder, report, step)
    device = choose_device(request.config.device, read_environment(os.environ))
    precision = request.config.precision
    if saved.run is not None and "precision" not in request.named:
        precision = saved.run.config.precision
    dtype = choose_precision(precision, device)
    work = (_own_data if request.own_data else _other_data)(saved, request, preparation)
    model = saved.load(work.config, dtype, device)
    one = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    sums, done = Sums(work.opened.bytes_of_ids, device), 0
    for batch in work.batches:
        batch = batch.to(device)
        sums.add(model.loss(batch, one), [batch])
        done = min(done + batch.labels.numel(), work.tokens)
        progress(done, work.tokens)
    figures = sums.figures()
    return Evaluation(
        model=str(folder),
        step=saved.run.found.step if saved.run else None,
        data=work.description,
        tokens=figures.tokens,
        seq_length=work.config.train.seq_length,
        precision=name_of(dtype),
        loss=figures.loss,
        perplexity=figures.perplexity,
        bits_per_byte=figures.bits_per_byte,
        bytes_per_token=figures.bytes / figures.tokens if figures.bytes else None,
    )


def _own_data(saved: SavedModel, request: Request, preparation: Preparation) -> Work:
    """The very batches of an evaluation during training, on the data that the run held out."""
    if saved.run is None:
        raise UserError(Problem("data", None, "a model of transformers has no data of its own", NAME_DATA))
    config = saved.run.config
    train = replace(config.train, eval_interval=config.train.eval_interval or 1)
    if "train.eval_batches" in request.named:
        train = replace(train, eval_batches=request.config.train.eval_batches)
    config = replace(config, train=train)
    opened, known = open_data(config, preparation.prepare(config)), saved.run.state.data
    if opened.fingerprint != known.fingerprint:
        rule = f"it is not the data of the run any more: {opened.description} now, {known.description} then"
        raise UserError(Problem("data", config.data.path, rule, NAME_DATA))
    source = opened.validation
    if source is None:
        rule = "the run holds out nothing for validation"
        raise UserError(Problem("data.validation_fraction", config.data.validation_fraction, rule, NAME_DATA))
    steps = validation_batches(source, config, dp_rank=0, dp_size=1, device=torch.device("cpu"))
    batches = (batch for microbatches in steps for batch in microbatches)
    tokens = validation_samples(source, config) * train.seq_length
    return Work(config, opened, batches, tokens, f"the validation part of {opened.description}")


def _other_data(saved: SavedModel, request: Request, preparation: Preparation) -> Work:
    """All of the data that the request names, or as much as it asks for.

    It is read with the model's tokenizer, and with the run's own customs where the user does not say. Nothing is held
    out unless the user says so.
    """
    data, named = request.config.data, request.named
    seq_length = request.config.train.seq_length if "train.seq_length" in named else saved.seq_length
    positions = saved.config.max_positions
    if saved.config.position == "learned" and positions is not None and seq_length > positions:
        rule = f"the model has {positions:,} positions"
        raise UserError(Problem("train.seq_length", seq_length, rule, f"at most {positions}, or leave it out"))
    if saved.tokenizer_folder is None and data.source != "tokens":
        rule = "the folder holds no tokenizer, so there is nothing to encode text with"
        raise UserError(Problem("model", str(saved.folder), rule, "put its tokenizer there, or data=tokens"))
    held_out = "data.validation_fraction" in named and data.validation_fraction > 0
    data = data if held_out else replace(data, validation_fraction=0.0)
    if saved.run is not None:
        customs = {"mask_end_of_document", "cross_document_attention"} - {name.removeprefix("data.") for name in named}
        data = replace(data, **{name: getattr(saved.run.config.data, name) for name in customs})
    train = replace(request.config.train, seq_length=1, eval_interval=int(held_out))  # opens any text
    tokenizer = "byte" if saved.tokenizer_folder is None else str(saved.tokenizer_folder.absolute())
    config = replace(request.config, data=data, model=saved.config, tokenizer=tokenizer, train=train)
    opened = open_data(config, preparation.prepare(config))
    config = replace(config, train=replace(train, seq_length=seq_length))
    source = replace(opened.validation or opened.train, weights=(1,), seq_length=seq_length, seed=None)
    parts = list(_first_tokens(source.parts, request.max_tokens))
    batches = (batch for part in parts for batch in _windows(part, source, config, request.batch_size))
    description = opened.description + (", the part held out" if opened.validation else "")
    return Work(config, opened, batches, sum(part.tokens - 1 for part in parts), description)


def _first_tokens(parts: Sequence[Part], count: int | None) -> Iterator[Part]:
    """The parts as far as `count` predicted tokens reach; the first token of each is not predicted."""
    for part in parts:
        taken = part.tokens if count is None else min(part.tokens, count + 1)
        if taken > 1:
            yield replace(part, stop=part.first + taken)
            count = None if count is None else count - (taken - 1)


def _windows(part: Part, source: SampleSource, config: Config, rows: int) -> Iterator[Batch]:
    """All tokens of a part: `rows` windows at a time, then what is left, which is shorter."""
    count = part.samples(source.seq_length)
    for first in range(0, count, rows):
        yield read_batch(replace(source, parts=[part]), first, min(rows, count - first), config)
    rest = replace(part, first=part.first + count * source.seq_length)
    if rest.tokens > 1:
        yield read_batch(replace(source, parts=[rest], seq_length=rest.tokens - 1), 0, 1, config)
