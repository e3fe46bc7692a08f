"""Validation loss on a fixed set of batches: each rank sums over its own, then all ranks add up.

Ranks of one model compute each batch together, so a batch that one of them cannot read is refused by all before any of
them computes it.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.data.batch import Batch
from megalite.model.gpt import GPT
from megalite.parallel.context import ParallelContext
from megalite.train.job import agreed


def agreed_batches(context: ParallelContext, batches: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
    """This rank's `batches`, of which each rank has as many; raises UserError on all ranks where one of them does.

    One small all-reduce on the host for each.
    """
    while (microbatches := agreed(context, lambda: next(batches, None))) is not None:
        yield microbatches


@torch.no_grad()
def summed_loss(model: GPT, batches: Iterator[Sequence[Batch]], *, dtype: torch.dtype) -> Tensor:
    """Sum of the token losses of this rank's `batches` in nats, and their unmasked tokens [2]."""
    model.eval()
    totals = None
    for microbatches in batches:
        for batch in microbatches:
            one = torch.ones((), dtype=dtype, device=batch.tokens.device)
            part = torch.stack([model.loss(batch, one).double(), batch.loss_mask.sum().double()])
            totals = part if totals is None else totals + part
    model.train()
    assert totals is not None, "a validation set holds at least one batch"
    return totals


def mean_loss(totals: Tensor, data_parallel: dist.ProcessGroup | None) -> float:
    """Mean loss per unmasked token over the sums of all data-parallel ranks."""
    if data_parallel is not None:
        dist.all_reduce(totals, group=data_parallel)
    loss, tokens = totals.tolist()
    return float(loss / tokens)
