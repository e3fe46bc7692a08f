"""Validation loss on a fixed set of batches."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megalite.data.batch import Batch
from megalite.model.gpt import GPT


@torch.no_grad()
def validation_loss(
    model: GPT, batches: Iterator[Sequence[Batch]], *, dtype: torch.dtype, data_parallel: dist.ProcessGroup | None
) -> float:
    """Mean loss per unmasked token over all `batches` of all data-parallel ranks, in nats."""
    model.eval()
    totals = None
    for microbatches in batches:
        for batch in microbatches:
            one = torch.ones((), dtype=dtype, device=batch.tokens.device)
            part = torch.stack([model.loss(batch, one).double(), batch.loss_mask.sum().double()])
            totals = part if totals is None else totals + part
    model.train()
    assert totals is not None, "a validation set holds at least one batch"
    if data_parallel is not None:
        dist.all_reduce(totals, group=data_parallel)
    loss, tokens = totals.tolist()
    return float(loss / tokens)
