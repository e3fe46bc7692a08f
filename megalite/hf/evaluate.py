"""A saved model on data: loss, perplexity, bits per byte.

On a run's own validation part these are the numbers of its training: the same batches, the same sums. Other data is
evaluated whole, in windows that follow each other without overlap: of each of its files, every token but the first is
predicted once.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megalite.config.compose import load_part, names_of
from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.data.batches import read_batch, validation_batches
from megalite.data.open import OpenedData, open_data
from megalite.data.samples import SampleSource
from megalite.errors.problems import Problem, UserError
from megalite.hf.saved_model import SavedModel, open_model
from megalite.launch.device import name_of
from megalite.prepare.prepare import prepare
from megalite.train.evaluate import Sums

NAME_DATA = "name the data to evaluate on: data=stdlib, or data=text data.path=FILE"
Work = tuple[Config, OpenedData, SampleSource, str]  # a part of the opened data, which is said in words


@torch.no_grad()
def evaluate_saved(
    folder: Path, words: Sequence[str], step: int | None, rows: int, max_tokens: int | None
) -> dict[str, Any]:
    """Results of the model in `folder`, a run's (its newest checkpoint, or that of `step`) or one of transformers. The
    loss is the mean over the predicted tokens, in nats.

    Where the overrides `words` name no data, a run is evaluated on what it held out; of other data, at most
    `max_tokens` tokens, `rows` sequences at a time.
    """
    named = names_of(words)
    own_data = not any(name.partition(".")[0] == "data" for name in named)
    reads = ("train.eval_batches",) if own_data else ("data", "data.*", "train.seq_length")
    doer = "an evaluation of its own data" if own_data else "an evaluation"
    asked = load_part(words, doer, ("device", "precision", *reads))
    if own_data and max_tokens is not None:
        rule = "has no effect: a run's own validation part is evaluated as in training"
        raise UserError(Problem("--max-tokens", max_tokens, rule, NAME_DATA))
    saved = open_model(folder, step)
    config, opened, source, description = (_own_data if own_data else _other_data)(saved, asked, named)
    batches = _windows(source, config, rows, max_tokens or sum(part.tokens for part in source.parts))
    if own_data:
        steps = validation_batches(source, config, dp_rank=0, dp_size=1, device=torch.device("cpu"))
        batches = (batch for step in steps for batch in step)
    model = saved.load(replace(config, device=asked.device, precision=asked.precision))
    one = torch.ones((), dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    sums = Sums(opened.bytes_of_ids, model.device)
    for batch in (batch.to(model.device) for batch in batches):
        sums.add(model.loss(batch, one), [batch])
    found = sums.metrics()
    return {
        "model": str(folder),
        "step": saved.found.step if saved.found else None,
        "data": description,
        "tokens": found.tokens,
        "seq_length": config.train.seq_length,
        "precision": name_of(model.dtype),
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,  # None: the bytes of the text are not known
        "bytes_per_token": found.bytes / found.tokens if found.bytes else None,
    }


def _own_data(saved: SavedModel, asked: Config, named: Set[str]) -> Work:
    """The data that the run held out."""
    config, state = saved.config, saved.state
    if state is None:
        raise UserError(Problem("data", None, "a model of transformers has no data of its own", NAME_DATA))
    count = (asked if "train.eval_batches" in named else config).train.eval_batches
    train = replace(config.train, eval_interval=config.train.eval_interval or 1, eval_batches=count)
    config = replace(config, train=train)
    opened, known = open_data(config, prepare(config)), state.data
    if opened.fingerprint != known.fingerprint:
        rule = f"it is not the data of the run any more: {opened.description} now, {known.description} then"
        raise UserError(Problem("data", config.data.path, rule, NAME_DATA))
    if opened.validation is None:
        rule = "the run holds out nothing for validation"
        raise UserError(Problem("data.validation_fraction", config.data.validation_fraction, rule, NAME_DATA))
    return config, opened, opened.validation, f"the validation part of {opened.description}"


def _other_data(saved: SavedModel, asked: Config, named: Set[str]) -> Work:
    """The data that the overrides name, read with the model's tokenizer, and masked as the run's own where the user
    does not say. Nothing is held out unless the user says so."""
    seq_length = asked.train.seq_length if "train.seq_length" in named else saved.config.train.seq_length
    positions = saved.config.model.max_positions
    if saved.config.model.position == "learned" and positions is not None and seq_length > positions:
        rule = f"the model has {positions:,} positions"
        raise UserError(Problem("train.seq_length", seq_length, rule, f"at most {positions}, or leave it out"))
    if saved.tokenizer_folder is None and asked.data.source != "tokens":
        rule = "the folder holds no tokenizer, so there is nothing to encode text with"
        raise UserError(Problem("model", str(saved.folder), rule, "put its tokenizer there, or data=tokens"))
    held_out = asked.data.validation_fraction if "data.validation_fraction" in named else 0.0
    data = replace(asked.data, validation_fraction=held_out)
    if saved.found is not None:
        masks = {"mask_end_of_document", "cross_document_attention"} - {name.removeprefix("data.") for name in named}
        data = replace(data, **{name: getattr(saved.config.data, name) for name in masks})
    train = replace(asked.train, seq_length=1, eval_interval=int(held_out > 0))  # opens any text
    tokenizer = "byte" if saved.tokenizer_folder is None else str(saved.tokenizer_folder.absolute())
    config = replace(asked, data=data, model=saved.config.model, tokenizer=tokenizer, train=train)
    opened = open_data(config, prepare(config))
    source = replace(opened.validation or opened.train, weights=(1,), seq_length=seq_length, seed=None)
    description = opened.description + (", the part held out" if opened.validation else "")
    return replace(config, train=replace(train, seq_length=seq_length)), opened, source, description


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
