"""A saved model on data: loss, perplexity, bits per byte.

On a run's own validation part these are the figures of its training: the same batches, the same sums. Other data is
evaluated whole, in windows that follow each other without overlap: of each of its files, every token but the first is
predicted once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.data.batches import read_batch, validation_batches, validation_samples
from megalite.data.open import Preparation, open_data, paths_of
from megalite.data.permutation import IntArray
from megalite.data.samples import Part, SampleSource
from megalite.data.token_file import with_suffix
from megalite.data.tokenizers import load_tokenizer
from megalite.errors.problems import Problem, UserError
from megalite.hf.evaluation_request import Request
from megalite.hf.saved_model import SavedModel, open_model
from megalite.launch.device import choose_device, choose_precision, name_of
from megalite.launch.environment import read_environment
from megalite.model.gpt import GPT
from megalite.train.evaluate import Figures, Sums
from megalite.train.state import SavedState

NAME_DATA = "name the data to evaluate on: data=stdlib, or data=text data.path=FILE"
Progress = Callable[[int, int], None]  # tokens done, tokens in all


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
class Work:
    """What is computed: batches, how many tokens they predict at most, and the bytes of text of each token id."""

    batches: Iterator[Batch]
    tokens: int
    seq_length: int
    bytes_of_ids: IntArray | None
    description: str


def evaluate_saved(
    folder: Path,
    request: Request,
    preparation: Preparation,
    report: Callable[[str], None],
    progress: Progress,
    step: int | None = None,
) -> Evaluation:
    """The model in `folder`, a run's (its newest checkpoint, or that of `step`) or one of transformers, on the data.

    `report` is told of damaged checkpoints that were passed over. UserError for whatever does not fit together.
    """
    model = open_model(folder, report, step)
    device = choose_device(request.config.device, read_environment(os.environ))
    precision = request.config.precision
    if model.run is not None and "precision" not in request.named:
        precision = model.run.config.precision
    dtype = choose_precision(precision, device)
    config, work = (_own_data if request.own_data else _other_data)(model, request, preparation)
    gpt = model.load(config, dtype, device)
    figures = _figures(gpt, work, progress)
    return Evaluation(
        model=str(folder),
        step=model.run.step if model.run else None,
        data=work.description,
        tokens=figures.tokens,
        seq_length=work.seq_length,
        precision=name_of(dtype),
        loss=figures.loss,
        perplexity=figures.perplexity,
        bits_per_byte=figures.bits_per_byte,
        bytes_per_token=figures.bytes / figures.tokens if figures.bytes else None,
    )


@torch.no_grad()
def _figures(model: GPT, work: Work, progress: Progress) -> Figures:
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    one = torch.ones((), dtype=dtype, device=model.device)
    sums, done = Sums(work.bytes_of_ids, model.device), 0
    for batch in work.batches:
        batch = batch.to(model.device)
        sums.add(model.loss(batch, one), [batch])
        done = min(done + batch.labels.numel(), work.tokens)
        progress(done, work.tokens)
    return sums.figures()


# --- the data that a run held out ------------------------------------------------------------------------------------


def _own_data(model: SavedModel, request: Request, preparation: Preparation) -> tuple[Config, Work]:
    """The very batches of an evaluation during training."""
    if model.run is None:
        raise UserError(Problem("data", None, "a model of transformers has no data of its own", NAME_DATA))
    config = model.run.config
    if "train.eval_batches" in request.named:
        config = replace(config, train=replace(config.train, eval_batches=request.config.train.eval_batches))
    config = replace(config, train=replace(config.train, eval_interval=config.train.eval_interval or 1))
    opened = open_data(config, preparation.prepare(config))
    known = SavedState.of(model.run.found).data
    if opened.fingerprint != known.fingerprint:
        rule = f"it is not the data of the run any more: {opened.description} now, {known.description} then"
        raise UserError(Problem("data", config.data.path, rule, NAME_DATA))
    source = opened.validation
    if source is None:
        rule = "the run holds out nothing for validation"
        raise UserError(Problem("data.validation_fraction", config.data.validation_fraction, rule, NAME_DATA))
    seq_length = config.train.seq_length
    steps = validation_batches(source, config, dp_rank=0, dp_size=1, device=torch.device("cpu"))
    work = Work(
        batches=(batch for microbatches in steps for batch in microbatches),
        tokens=validation_samples(source, config) * seq_length,
        seq_length=seq_length,
        bytes_of_ids=opened.bytes_of_ids,
        description=f"the validation part of {opened.description}",
    )
    return config, work


# --- any other data --------------------------------------------------------------------------------------------------


def _other_data(model: SavedModel, request: Request, preparation: Preparation) -> tuple[Config, Work]:
    """All of the data that the request names, or as much as it asks for."""
    seq_length = request.config.train.seq_length if "train.seq_length" in request.named else model.seq_length
    positions = model.config.max_positions if model.config.position == "learned" else None
    if positions is not None and seq_length > positions:
        rule = f"the model has {positions:,} positions"
        raise UserError(Problem("train.seq_length", seq_length, rule, f"at most {positions}, or leave it out"))
    config = _config_for(model, request)
    _refuse_other_tokenizers(model, config)
    opened = open_data(config, preparation.prepare(config))
    parts = _first_tokens((opened.validation or opened.train).parts, request.max_tokens)
    end = None if opened.tokenizer is None else opened.tokenizer.end_of_document
    config = replace(config, train=replace(config.train, seq_length=seq_length))

    def batches() -> Iterator[Batch]:
        for part in parts:
            source = SampleSource([part], (1,), seq_length, opened.vocab_size, None, end)
            yield from _batches(source, config, request.batch_size)

    return config, Work(
        batches=batches(),
        tokens=sum(part.tokens - 1 for part in parts),
        seq_length=seq_length,
        bytes_of_ids=opened.bytes_of_ids,
        description=opened.description + (", the part held out" if opened.validation else ""),
    )


def _config_for(model: SavedModel, request: Request) -> Config:
    """The request's settings with the model's tokenizer, and the run's own customs where the user does not say.

    Samples of one token let any text be opened; nothing is held out unless the user says so.
    """
    data, named = request.config.data, request.named
    evaluated = "data.validation_fraction" in named and data.validation_fraction > 0
    if not evaluated:
        data = replace(data, validation_fraction=0.0)
    if model.run is not None:
        customs = {"mask_end_of_document", "cross_document_attention"} - {name.removeprefix("data.") for name in named}
        data = replace(data, **{name: getattr(model.run.config.data, name) for name in customs})
    if model.tokenizer_folder is None and data.source != "tokens":
        rule = "the folder holds no tokenizer, so there is nothing to encode text with"
        raise UserError(Problem("model", str(model.folder), rule, "put its tokenizer there, or data=tokens"))
    return replace(
        request.config,
        data=data,
        model=model.config,
        tokenizer="byte" if model.tokenizer_folder is None else str(model.tokenizer_folder.absolute()),
        train=replace(request.config.train, seq_length=1, eval_interval=int(evaluated)),
    )


def _refuse_other_tokenizers(model: SavedModel, config: Config) -> None:
    """Token files of another tokenizer would be read as other text."""
    if config.data.source != "tokens" or model.tokenizer is None:
        return
    ours = model.tokenizer.backend.get_vocab(with_added_tokens=True)
    problems = []
    for path in paths_of(config.data):
        folder = with_suffix(Path(path).expanduser(), ".tokenizer")
        if folder.is_dir() and load_tokenizer(folder).backend.get_vocab(with_added_tokens=True) != ours:
            rule = f"its tokens were made with another tokenizer than the model's, {model.tokenizer.name}"
            problems.append(Problem("data.path", path, rule, "prepare the text with the tokenizer of the model"))
    if problems:
        raise UserError(problems)


def _first_tokens(parts: Sequence[Part], count: int | None) -> list[Part]:
    """The parts as far as `count` tokens reach, and one more, which nothing predicts."""
    kept: list[Part] = []
    for part in parts:
        taken = part.tokens if count is None else min(part.tokens, count + 1)
        if taken > 1:
            kept.append(Part(part.file, part.first, part.first + taken))
            count = None if count is None else count - (taken - 1)
    return kept


def _batches(source: SampleSource, config: Config, rows: int) -> Iterator[Batch]:
    """All tokens of the source's one part: `rows` windows at a time, then what is left, which is shorter."""
    [part] = source.parts
    count = part.samples(source.seq_length)
    for first in range(0, count, rows):
        yield read_batch(source, first, min(rows, count - first), config)
    rest = Part(part.file, part.first + count * source.seq_length, part.stop)
    if rest.tokens > 1:
        yield read_batch(replace(source, parts=[rest], seq_length=rest.tokens - 1), 0, 1, config)
