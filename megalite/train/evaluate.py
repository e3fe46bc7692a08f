"""Validation loss on a fixed set of batches: each rank sums over its own, then all ranks add up.

Ranks of one model compute each batch together, so a batch that one of them cannot read is refused by all before any of
them computes it.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megalite.data.batch import Batch
from megalite.parallel.context import ParallelContext
from megalite.train.job import agreed
from megalite.train.training import Training


def agreed_batches(context: ParallelContext, batches: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
    """This rank's `batches`, of which each rank has as many; raises UserError on all ranks where one of them does.

    One small all-reduce on the host for each.
    """
    while (microbatches := agreed(context, lambda: next(batches, None))) is not None:
        yield microbatches


def mean_loss(training: Training, context: ParallelContext, batches: Iterator[Sequence[Batch]]) -> float:
    """Mean loss per unmasked token over this rank's `batches` and those of all others, the same on all ranks."""
    dtype = training.buffers.master_dtype
    one = torch.ones((), dtype=dtype, device=context.device)
    totals = torch.zeros(2, dtype=torch.float64, device=context.device)  # loss, tokens
    for chunk in training.chunks:
        chunk.eval()
    for microbatches in batches:
        loss = training.executor.evaluate(microbatches, one)
        tokens = torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum()
        totals += torch.stack([loss.double(), tokens.double()])
    for chunk in training.chunks:
        chunk.train()
    if not training.has_loss or context.index("tp") > 0:
        totals.zero_()  # others of the same model tell it
    world = context.group("world")
    if world is not None:
        dist.all_reduce(totals, group=world)
    loss_sum, count = totals.tolist()
    return float(loss_sum / count)
