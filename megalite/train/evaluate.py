"""Validation figures on a fixed set of batches: each rank sums over its own, then all ranks add up.

Loss, tokens and bytes of text are sums over the same labels, those that count in the loss. Ranks of one model compute
each batch together, so a batch that one of them cannot read is refused by all before any of them computes it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.data.batch import Batch
from megalite.data.permutation import IntArray
from megalite.errors.problems import Problem, UserError
from megalite.launch.agreement import together
from megalite.launch.context import ParallelContext
from megalite.train.build import Training


@dataclass(frozen=True)
class Figures:
    """`loss` is the mean over `tokens` labels, in nats; `bytes` of text are what they stand for, 0 where not known."""

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # exp overflows a double from there on

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss / math.log(2) * self.tokens / self.bytes if self.bytes else None


class Sums:
    """Adds up what the figures are made of. `bytes_of_ids` [vocab] are those of token_bytes.py, None if not known."""

    def __init__(self, bytes_of_ids: IntArray | None, device: torch.device) -> None:
        self._bytes = None if bytes_of_ids is None else torch.from_numpy(bytes_of_ids).to(device)
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)  # what ranks sum
        self._loss, self._tokens, self._size = self.totals.unbind()  # views

    def add(self, loss: Tensor, batches: Sequence[Batch]) -> None:
        """`loss` is the sum over the batches' unmasked labels. Nothing here waits for the device."""
        self._loss += loss
        for batch in batches:
            self._tokens += batch.loss_mask.sum()
            if self._bytes is not None:
                self._size += (self._bytes[batch.labels] * batch.loss_mask).sum()

    def figures(self) -> Figures:
        """UserError if no label counted."""
        loss, tokens, size = self.totals.tolist()
        if not tokens:
            rule = "no token of the data to evaluate on is to be predicted"
            raise UserError(Problem("data.mask_end_of_document", True, rule, "set it to false, or give more text"))
        return Figures(loss / tokens, int(tokens), int(size))


def evaluate(
    training: Training,
    context: ParallelContext,
    batches: Iterator[list[Batch]],
    bytes_of_ids: IntArray | None,
    go_on: Callable[[], bool] = lambda: True,
) -> Figures | None:
    """Of this rank's `batches`, of which each rank has as many, and those of all others; the same on all ranks.

    A UserError of reading a batch on any rank is raised on all: one small all-reduce on the host for each. `go_on`,
    equal on all ranks, is asked before each batch; once it is false there are no figures.
    """
    one = torch.ones((), dtype=training.buffers.master_dtype, device=context.device)
    sums = Sums(bytes_of_ids, context.device)
    for chunk in training.chunks:
        chunk.eval()
    going = True
    while (microbatches := together(context, lambda: next(batches, None))) is not None and (going := go_on()):
        sums.add(training.executor.evaluate(microbatches, one), microbatches)
    for chunk in training.chunks:
        chunk.train()
    if not going:
        return None
    if not training.has_loss or context.index("tp") > 0:
        sums.totals.zero_()  # other ranks of the same model add theirs
    world = context.group("world")
    if world is not None:
        dist.all_reduce(sums.totals, group=world)
    return sums.figures()
