"""The head and the cross entropy as one function that never holds fp32 logits of all tokens.

Invariant: tokens are taken in chunks; the logits of one chunk exist in the compute dtype, and a piece of them at a time
in fp32. Maximum, sum of exponentials, loss and probabilities are fp32 (fp64 in fp64) whatever the compute dtype. Where
gradients are wanted they are taken chunk by chunk in the forward pass, from the logits at hand, so that nothing as
large as logits waits for backward. The padding of the vocabulary has probability zero and a gradient of exactly zero.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tokens per chunk. Each chunk reads and writes the whole gradient of the weight once, so chunks must be long; 512 on a
# CPU cost a few percent more than 1024 and hold half the logits. CUDA needs larger products to be busy.
CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}

# Elements worked on at once in fp32. On a CPU 4 MiB, so that the passes over a piece stay in the caches (a whole chunk
# at once measured 2 to 6 times slower); on CUDA 512 MiB, which only bounds memory.
PIECE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    scale: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int | None = None,
    grad_sink: Tensor | None = None,
) -> Tensor:
    """scale * sum over unmasked tokens of -log softmax(hidden weight[:vocab_size]^T)[label]: a 0-d fp32 (fp64) tensor.

    hidden [n, h]; weight [padded_vocab, h]; labels int64 [n], within the vocabulary also where masked; loss_mask bool
    [n]; scale 0-d, a constant to autograd.

    With `grad_sink` (fp32 or fp64, like weight) the gradient of the weight is added to it in this very call, if
    gradients are enabled and the weight requires one, and autograd returns none for the weight. That is right only
    where the returned value itself is the root of backward, with an upstream gradient of one: factors go into `scale`.
    """
    n, width = hidden.shape
    assert weight.shape[1] == width
    assert labels.shape == loss_mask.shape == (n,)
    assert 0 < vocab_size <= weight.shape[0]
    chunk = max(1, min(n, chunk_tokens or CHUNK_TOKENS[hidden.device.type]))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, loss_mask, scale, vocab_size, chunk, grad_sink)
        return loss
    return _sweep(hidden, weight, labels, loss_mask, scale, vocab_size, chunk, None, None)


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one sweep over the chunks; backward multiplies by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        scale: Tensor,
        vocab_size: int,
        chunk: int,
        grad_sink: Tensor | None,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = None
        if wants_weight and grad_sink is None:
            weight_grad = torch.zeros_like(weight, dtype=_statistics_dtype(weight))  # chunks add up in fp32
        sink = grad_sink if wants_weight and grad_sink is not None else weight_grad

        loss = _sweep(hidden, weight, labels, loss_mask, scale, vocab_size, chunk, hidden_grad, sink)
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = (None if saved is None else saved * upstream for saved in ctx.saved_tensors)
        return hidden_grad, weight_grad, None, None, None, None, None, None


def _sweep(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    scale: Tensor,
    vocab_size: int,
    chunk: int,
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
) -> Tensor:
    """The scaled loss, chunk by chunk; fills `hidden_grad` [n, h], adds to `weight_grad` [padded_vocab, h]."""
    n, padded_vocab = hidden.shape[0], weight.shape[0]
    dtype, device = _statistics_dtype(weight), hidden.device
    piece = min(chunk, max(1, PIECE_ELEMENTS[device.type] // padded_vocab))
    logits = hidden.new_empty(chunk, padded_vocab)
    work = torch.empty(2, 0 if hidden.is_cuda else piece, padded_vocab, dtype=dtype, device=device)
    token_loss = torch.empty(n, dtype=dtype, device=device)
    row_scale = loss_mask.to(dtype) * scale.to(dtype)  # [n]

    for start in range(0, n, chunk):
        x = hidden[start : start + chunk]  # [c, h]
        chunk_logits = logits[: x.shape[0]]
        torch.mm(x, weight.t(), out=chunk_logits)  # [c, padded_vocab]
        chunk_logits[:, vocab_size:] = -torch.inf
        for first in range(0, x.shape[0], piece):
            part = chunk_logits[first : first + piece]
            rows = slice(start + first, start + first + part.shape[0])
            token_loss[rows], probabilities = _softmax_loss(part, labels[rows, None], work)
            if hidden_grad is not None or weight_grad is not None:
                # d loss / d logits = (probability - [column is the label]) * row_scale, in place of the logits
                probabilities.scatter_add_(1, labels[rows, None], probabilities.new_full((part.shape[0], 1), -1.0))
                part.copy_(probabilities.mul_(row_scale[rows, None]))
        if hidden_grad is not None:
            torch.mm(chunk_logits, weight, out=hidden_grad[start : start + chunk])
        if weight_grad is not None:
            _add_transposed_product(weight_grad, chunk_logits, x)
    return scale.to(dtype) * token_loss.masked_fill_(~loss_mask, 0.0).sum()


def _softmax_loss(logits: Tensor, labels: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """Token losses [r] and probabilities [r, padded_vocab] of logits [r, padded_vocab] and labels [r, 1].

    `work` is of the statistics' dtype and, on a CPU, two buffers [*, padded_vocab], since fresh pages cost more there
    than the arithmetic; CUDA's allocator makes them needless. The log of the sum of exponentials follows from the
    largest probability, which cannot underflow as the label's own can: log sum exp = largest logit - log(largest p).
    """
    r = logits.shape[0]
    if logits.is_cuda:
        probabilities = torch.softmax(logits, -1, dtype=work.dtype)  # one kernel reads bf16 and writes fp32
    else:
        logits = work[0, :r].copy_(logits) if logits.dtype != work.dtype else logits
        probabilities = torch.softmax(logits, -1, out=work[1, :r])
    log_sum = logits.amax(-1).to(work.dtype) - probabilities.amax(-1).log_()
    return log_sum - logits.gather(1, labels)[:, 0].to(work.dtype), probabilities


def _add_transposed_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [v, h] += left^T right for left [c, v], right [c, h]; total may be of wider dtype than the product's."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif total.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        # No CPU kernel multiplies bf16 into fp32, and mixed sums are slow: product, widened copy, sum, tile by tile.
        rows = min(total.shape[0], max(1, PIECE_ELEMENTS["cpu"] // total.shape[1]))
        product, widened = right.new_empty(rows, total.shape[1]), total.new_empty(rows, total.shape[1])
        for tile, columns in zip(total.split(rows), left.split(rows, dim=1), strict=True):
            torch.mm(columns.t(), right, out=product[: len(tile)])
            tile.add_(widened[: len(tile)].copy_(product[: len(tile)]))


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
