"""Cross entropy on CUDA in one kernel: logits are read from memory once, and gradients written in their place once.

A program takes one row: a first loop finds the maximum and the sum of exponentials, a second one, which finds the row
in the cache, writes the gradient. Triton is a part of torch's builds for CUDA; nothing else imports this file.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.model.loss import TokenLoss

BLOCK, WARPS = 8192, 16  # columns at once: the fastest of 16 choices with 50,304 and near it with 32,000, on one H100
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def softmax_losses(logits: Tensor, labels: Tensor, upstream: Tensor | None, loss: TokenLoss) -> Tensor:
    """The `loss` [r], fp32, of logits [r, columns] in any dtype but fp64, all columns of the vocabulary and its
    padding; with `upstream` [r], fp32, the gradient of sum(upstream * losses) in place of the logits, 0 for padding."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    assert logits.stride(1) == 1, logits.stride()
    _softmax_losses[(len(logits),)](
        *(logits, labels, losses if upstream is None else upstream, losses),
        *(logits.stride(0), logits.shape[1], loss.vocab_size, loss.label_smoothing, loss.z_loss),
        writes=upstream is not None,
        smooths=loss.label_smoothing != 0.0,
        block=BLOCK,
        num_warps=WARPS,
    )
    return losses


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_losses(  # type: ignore[no-untyped-def]
    logits,
    labels,
    upstream,
    losses,
    stride,
    columns,
    real,
    smoothing,
    z_loss,
    writes: tl.constexpr,
    smooths: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    label_logit = tl.load(logits + label).to(tl.float32)
    offsets = tl.arange(0, block)
    top = float("-inf")
    sums, all_logits = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for start in range(0, real, block):
        column = start + offsets
        # Masked by `columns`, a multiple of 16 as `real` is not: sixteen bytes at once.
        x = tl.load(logits + column, column < columns, eviction_policy="evict_last").to(tl.float32)
        x = tl.where(column < real, x, float("-inf"))
        if smooths:
            all_logits += tl.where(column < real, x, 0.0)
        x *= LOG2_E
        higher = tl.maximum(top, tl.max(x, 0))
        sums = sums * tl.exp2(top - higher) + tl.exp2(x - higher)
        top = higher
    total = tl.sum(sums, 0)
    log_total, top_logit = tl.log2(total) * LN_2, top * LN_2
    log_sum = top_logit + log_total
    loss = log_total + (1 - smoothing) * (top_logit - label_logit) + z_loss * log_sum * log_sum
    if smooths:
        loss += smoothing * (top_logit - tl.sum(all_logits, 0) / real)
    if writes:
        weight = tl.load(upstream + row)
        scale, of_label = weight * (1 + 2 * z_loss * log_sum) / total, weight * (1 - smoothing)
        of_all = weight * smoothing / real
        for start in range(0, columns, block):
            column = start + offsets
            x = tl.load(logits + column, column < columns, eviction_policy="evict_first").to(tl.float32)
            x = tl.where(column < real, x, float("-inf"))
            gradient = tl.exp2(x * LOG2_E - top) * scale - tl.where(column == label, of_label, 0.0)
            if smooths:
                gradient -= tl.where(column < real, of_all, 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), column < columns)
    tl.store(losses + row, loss)
