"""Validation metrics on a fixed set of batches: each rank sums over its own, then all ranks add up.

Loss, tokens and bytes of text are sums over the same labels, which count in the loss. Ranks of one model compute each
batch together, so a batch that one of them cannot read is refused by all before any of them computes it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.data.batch import Batch
from megalite.data.samples import IntArray
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext, all_ranks_or_raise
from megalite.train.build import Training


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


class Sums:
    """Loss, tokens and bytes, added up on the device; nothing waits for it before `metrics`."""

    def __init__(self, bytes_of_ids: IntArray | None, device: torch.device) -> None:
        """`bytes_of_ids`: by token [vocab] (data/token_bytes.py); None where not known."""
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
    """The metrics over the `batches` of all ranks; each rank has as many, and gets the same metrics.

    A UserError of reading a batch on any rank is raised on all: one small all-reduce on the host for each. `go_on`,
    equal on all ranks, is asked before each batch; once it is false there are no metrics.
    """
    one = torch.ones((), dtype=training.buffers.master_dtype, device=context.device)
    sums = Sums(bytes_of_ids, context.device)
    with training.evaluating():
        while (microbatches := all_ranks_or_raise(context, lambda: next(batches, None))) is not None:
            if not go_on():
                return None
            sums.add(training.executor.evaluate(microbatches, one), microbatches)
    if not training.has_loss or context.index("tp") > 0:
        sums.totals.zero_()  # other ranks of the same model add theirs
    if (world := context.group("world")) is not None:
        dist.all_reduce(sums.totals, group=world)
    return sums.metrics()
