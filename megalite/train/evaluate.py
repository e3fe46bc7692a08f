"""The worth of a model: validation metrics on a fixed set of batches, and samples of text.

Ranks of one model compute each validation batch together, so a batch that one of them cannot read is refused by all
before any of them computes it. In a sample of text the newest token's distribution is sampled and appended, one token
at a time. The same weights, prompt and seed give the same text on any layout, up to rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import Config
from megalite.data.batch import Batch, unscored
from megalite.data.open import OpenedData
from megalite.data.samples import IntArray
from megalite.errors.problems import Problem, UserError, collect_all
from megalite.launch.context import ParallelContext, all_ranks_or_raise
from megalite.model.gpt import GPT
from megalite.train.build import Training, data_share


@dataclass(frozen=True)
class ValidationMetrics:
    """`loss`: the mean over `tokens` labels, in nats. `bytes`: of the text of these labels, 0 where not known."""

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # exp overflows a double from there on

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss / math.log(2) * self.tokens / self.bytes if self.bytes else None


def evaluation_record(found: ValidationMetrics, averaged: ValidationMetrics | None = None) -> dict[str, float | None]:
    """What is recorded of an evaluation of a set; `averaged`: with the averages of the weights."""
    record = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    return record | ({} if averaged is None else {"loss_ema": averaged.loss})


class Sums:
    """Loss, tokens and bytes of text over the labels that count, added up on the device; nothing waits for it before
    `metrics`. `bytes_of_ids`: by token [vocab] (data/tokenizers.py); None where not known."""

    def __init__(self, bytes_of_ids: IntArray | None, device: torch.device) -> None:
        self._bytes = None if bytes_of_ids is None else torch.from_numpy(bytes_of_ids).to(device)
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)  # what ranks sum

    def add(self, loss: Tensor, batches: Sequence[Batch]) -> None:
        """`loss` is the sum over the batches' unmasked labels."""
        self.totals[0] += loss
        for batch in batches:
            self.totals[1] += batch.loss_mask.sum()
            if self._bytes is not None:
                self.totals[2] += (self._bytes[batch.labels] * batch.loss_mask).sum()

    def metrics(self) -> ValidationMetrics:
        """UserError if no label counted."""
        loss, tokens, size = self.totals.tolist()
        if not tokens:
            rule = "no token of the data to evaluate on is to be predicted"
            raise UserError(Problem("data.mask_end_of_document", True, rule, "set it to false, or give more text"))
        return ValidationMetrics(loss / tokens, int(tokens), int(size))


def evaluate(
    training: Training,
    context: ParallelContext,
    batches: Iterator[list[Batch]],
    bytes_of_ids: IntArray | None,
    go_on: Callable[[], bool] = lambda: True,
) -> ValidationMetrics | None:
    """The metrics over the `batches` of all ranks, of which each rank has as many; the same on all ranks. None where
    `go_on`, which is asked before each batch and equal on all ranks, becomes false."""
    one = torch.ones((), dtype=training.buffers.master_dtype, device=context.device)
    sums = Sums(bytes_of_ids, context.device)
    with training.evaluating():
        while (microbatches := all_ranks_or_raise(context, lambda: next(batches, None))) is not None:
            if not go_on():
                return None
            sums.add(training.executor.evaluate(microbatches, one), microbatches)
    if not training.chunks[-1].has_loss or context.index("tp") > 0:
        sums.totals.zero_()  # other ranks of the same model add theirs
    if (world := context.group("world")) is not None:
        dist.all_reduce(sums.totals, group=world)
    return sums.metrics()


TEMPERATURE, TOP_K = 0.8, 50
PROMPTS = {"stdlib": "def "}  # how samples begin where nobody says, by data source; otherwise with an end of document
WINDOW = 64  # a window that may be shorter than the sequence is a multiple of this


def prompts_of(config: Config, data: OpenedData) -> dict[str, list[int]]:
    """The texts to continue, and their tokens, at least one; none where the tokenizer of the data is not known.
    UserError for a prompt that it cannot encode."""
    asked, tokenizer, part = config.train.sample_prompts, data.tokenizer, data.train.parts[0]
    if tokenizer is None and asked:
        remedy = "leave it out, or name the tokenizer that made the token files: tokenizer=NAME_OR_FOLDER"
        raise UserError(Problem("train.sample_prompts", asked, "the tokenizer of this data is not known", remedy))
    if tokenizer is None or config.train.sample_tokens == 0:
        return {}
    # An empty prompt stands for an end of document, or where the tokenizer knows none for the first token of the data.
    end = tokenizer.end_of_document
    start = [int(part.file.tokens[part.first])] if end is None else [end]

    def prompt(text: str) -> tuple[str, list[int]]:
        try:
            return text, tokenizer.encode(text) or start
        except UserError as error:
            remedy = "begin with symbols of the training text, or use tokenizer=byte"
            raise UserError(Problem("train.sample_prompts", text, error.problems[0].rule, remedy)) from error

    return dict(collect_all(prompt, [PROMPTS.get(config.data.source, "")] if asked is None else asked))


@torch.no_grad()
def sample(
    training: Training,
    context: ParallelContext,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    seq_length: int,
    seed: int,
    rows: int | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> list[list[int]]:
    """The `count` tokens that follow each of the `prompts` (of at least one token), on all ranks of a model.

    A compiled model sees one shape only: windows of `rows` and `seq_length`. Without `rows` a window is no longer than
    needed. Once `go_on`, asked before each token and equal on all ranks, is false, no text grows any more.
    """
    length, pipeline, share = seq_length, context.group("pp-forward"), data_share(context).sequence
    if rows is None:
        unit, longest = WINDOW * context.layout.tp * context.layout.cp, max(map(len, prompts), default=0) + count
        length = min(seq_length, -(-longest // unit) * unit)  # tp and cp split a window
    texts = [list(prompt) for prompt in prompts]
    with training.evaluating():
        for text in texts:
            dice = torch.Generator().manual_seed(seed)
            for _ in takewhile(lambda _: go_on(), range(count)):
                window = torch.zeros((rows or 1, length), dtype=torch.int64)  # [b, s]
                window[:, : len(text)] = torch.tensor(text[-length:])
                hidden = training.executor.hidden(unscored(window).part(share).to(context.device))
                token = torch.zeros(1, dtype=torch.int64)
                if hidden is not None:  # the pipeline ends here
                    token = _draw(training.chunks[-1], hidden, min(len(text), length) - 1, dice)
                if pipeline is not None:
                    token = token.to(context.device)
                    dist.broadcast(token, group=pipeline, group_src=pipeline.size() - 1)
                text.append(int(token))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _draw(end: GPT, hidden: Tensor, place: int, dice: torch.Generator) -> Tensor:
    """The token [1] after `place` of the first row, from this rank's part of the hidden states."""
    logits = end.head_logits(end.whole_sequence(hidden)[place, :1]).float().cpu()[0]  # [vocabulary]
    best, candidates = logits.topk(min(TOP_K, len(logits)))
    return candidates[torch.multinomial(torch.softmax(best / TEMPERATURE, dim=0), 1, generator=dice)]
