"""The head and the cross entropy as one function that never holds fp32 logits of all tokens.

Tokens are taken in chunks, whose logits exist one chunk at a time in the compute dtype, and only a small piece in fp32.
Statistics are fp32 (fp64 in fp64) whatever the compute dtype. Gradients are taken chunk by chunk in the forward pass,
so that nothing as large as logits waits for backward. The padding of the vocabulary has probability zero and a gradient
of exactly zero.

Ranks may each have the logits of some columns of the vocabulary. The statistics of these, three or four numbers per
token, travel in one all-gather per chunk, and every rank combines them in the same order: the loss of a token is the
same number, bit for bit, on every rank, and depends on the number of ranks only by rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.kernels.products import add_transposed_product, statistics_dtype
from megalite.tensor_parallel.collectives import (
    TensorGroup,
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

# Tokens per chunk; on a CPU at least so many, and as many as CHUNK_BYTES hold. Each chunk reads and writes the whole
# gradient of the weight once, so chunks must be long. With 50,000 columns a CPU gains nothing from more than these, and
# CUDA needs larger products to be busy.
CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
CHUNK_BYTES = 16 << 20  # of logits, on a CPU: more tokens of a small vocabulary (4,096, bf16: 2,048 in 0.8 of the time)
# Elements worked on at once in fp32. On a CPU 4 MiB, so that the passes over a piece stay in the caches (a whole chunk
# at once measured 2 to 6 times slower); on CUDA 512 MiB, which only bounds memory.
PIECE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


@dataclass
class TokenLoss:
    """logsumexp - (1 - label_smoothing) * logit[label] - label_smoothing * mean(logits) + z_loss * logsumexp^2.

    Sum, mean and label are over the `vocab_size` logits of a token, of which this rank of `group` has `real`, from
    `first` on; the rest of its `columns` is padding, whose logits must be -inf. (Label smoothing: Szegedy et al. 2016,
    arXiv 1512.00567. z-loss: Chowdhery et al. 2022, arXiv 2204.02311.)
    """

    padded_vocab: int
    group: TensorGroup | None
    vocab_size: int
    label_smoothing: float
    z_loss: float

    def __post_init__(self) -> None:
        self.index, self.size = (0, 1) if self.group is None else (self.group.index, self.group.size)
        self.first, stop = (at * self.padded_vocab // self.size for at in (self.index, self.index + 1))
        self.columns, self.real = stop - self.first, max(0, min(stop, self.vocab_size) - self.first)

    def statistics(self, logits: Tensor, labels: Tensor, *, keeps: bool = False) -> tuple[Tensor, Tensor | None]:
        """[3 or 4, r] of logits [r, columns]: maximum, sum of exp(logit - maximum), the label's logit (zero where
        another rank has it) and, for smoothing, the sum of logits. With `keeps` the powers exp(logit - maximum) too,
        unless a compiler makes kernels that write nothing as large as the logits."""
        if not self.real:
            shape = 4 if self.label_smoothing else 3, *labels.shape
            statistics = logits.new_zeros(shape, dtype=statistics_dtype(logits.dtype))
            statistics[0] = -torch.inf
            return statistics, None
        wide = logits.to(statistics_dtype(logits.dtype), copy=True)
        maxima = wide.amax(-1, keepdim=True)
        column, is_here = self._column(labels)
        rows = [torch.where(is_here, wide.gather(1, column[:, None])[:, 0], 0.0)]
        if self.label_smoothing:  # over as many columns as the other sums, to be taken with them
            rows.append(torch.where(_columns(wide) < self.real, wide, 0.0).sum(-1))
        powers = wide.sub_(maxima).exp_()
        statistics = torch.stack([maxima[:, 0], powers.sum(-1), *rows])
        return statistics, powers if keeps and not torch.compiler.is_compiling() else None

    def combine(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """From [t, k, r]: losses [r], and factors [r] from a softmax over this rank's columns to the gradient's term.

        Differences to the largest logit are summed, so that large logits cancel before they round anything.
        """
        maxima, sums, label_logits, *logit_sums = statistics.unbind(1)
        top = maxima.amax(0)
        sums = sums * (maxima - top).exp_()  # [t, r]
        total = sums.sum(0)
        log_total = total.log()
        losses = log_total + (1 - self.label_smoothing) * (top - label_logits.sum(0))
        if self.label_smoothing:
            losses += self.label_smoothing * (top - logit_sums[0].sum(0) / self.vocab_size)
        factor = sums[self.index] / total
        if self.z_loss:
            log_sum = top + log_total
            losses += self.z_loss * log_sum.square()
            factor *= 1 + 2 * self.z_loss * log_sum
        return losses, factor

    def differentiate(
        self,
        logits: Tensor,
        statistics: Tensor,
        labels: Tensor,
        factor: Tensor,
        upstream: Tensor,
        powers: Tensor | None = None,
    ) -> None:
        """The gradient of sum(upstream [r] * losses [r]) in place of the logits, of which `statistics` are [k, r].

        d loss / d logit = probability * (1 + 2 z logsumexp) - (1 - s) [is label] - s / vocab_size, 0 for padding.
        """
        if not self.real:
            logits.zero_()
            return
        column, is_here = self._column(labels)
        of_label = (1 - self.label_smoothing) * upstream * is_here
        maxima, sums = statistics[:2, :, None]
        powers = logits.to(statistics.dtype, copy=True).sub_(maxima).exp_() if powers is None else powers
        gradient = powers.mul_((factor * upstream)[:, None] / sums)
        if torch.compiler.is_compiling():  # one kernel, of which a scatter cannot be part
            gradient -= torch.where(_columns(logits) == column[:, None], of_label[:, None], 0.0)
        else:
            gradient.scatter_add_(1, column[:, None], -of_label[:, None])
        if self.label_smoothing:
            of_all = self.label_smoothing / self.vocab_size * upstream
            gradient -= torch.where(_columns(logits) < self.real, of_all[:, None], 0.0)
        logits.copy_(gradient)

    def _column(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The local column of each label, and whether it is here; elsewhere the column is any."""
        column = labels - self.first
        inside = column.clamp(0, self.real - 1)
        return inside, inside == column


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    scale: Tensor,
    token_loss: TokenLoss,
    *,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
    sequence_parallel: bool = False,
    compile: bool = False,
    note: Callable[[Tensor], object] = lambda losses: None,
) -> Tensor:
    """scale * sum over unmasked tokens of the `token_loss` of hidden weight^T: a 0-d fp32 (fp64) tensor.

    hidden [n, h]; weight [P, h], P the padded vocabulary; labels int64 [n], within the vocabulary also where masked;
    loss_mask bool [n]; scale 0-d, a constant to autograd. With a group of t ranks, weight is rows
    [i * P // t, (i + 1) * P // t) of rank i; all else is the same on every rank, bit for bit. With `sequence_parallel`
    hidden, and its gradient, is the rank's rows [i * n / t, (i + 1) * n / t) alone.

    With `main_grad` (fp32 or fp64, like weight) the gradient of the weight is added to it in this very call: right only
    where the returned value itself is the root of backward, with an upstream gradient of one (factors go into `scale`).
    `note` is given the losses [n] of all tokens, without the scale and 0 where they are masked.
    """
    assert token_loss.group is not None or not sequence_parallel
    n = hidden.shape[0] * (token_loss.size if sequence_parallel else 1)
    assert weight.shape == (token_loss.columns, hidden.shape[1])
    assert labels.shape == loss_mask.shape == (n,)
    chunk = max(1, min(n, chunk_tokens or _default_chunk(weight, token_loss)))
    sweep = _Sweep(labels, loss_mask, scale, token_loss, chunk, sequence_parallel, compile, note)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, sweep, main_grad)  # type: ignore[no-any-return]
    return sweep.run(hidden, weight)[0]


def _default_chunk(weight: Tensor, token_loss: TokenLoss) -> int:
    """Tokens: as many on all ranks of a group that divide a vocabulary unevenly, for they exchange each chunk."""
    if weight.is_cuda:
        return CHUNK_TOKENS["cuda"]
    columns = max(1, token_loss.padded_vocab // token_loss.size)
    return max(CHUNK_TOKENS["cpu"], CHUNK_BYTES // (weight.element_size() * columns))


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one sweep over the chunks; backward multiplies by the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, sweep: "_Sweep", main_grad: Tensor | None) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        weight_grad = None
        if wants_weight and main_grad is None:
            weight_grad = torch.zeros_like(weight, dtype=statistics_dtype(weight.dtype))  # chunks add up in fp32
        main_grad = main_grad if wants_weight and main_grad is not None else weight_grad
        loss, hidden_grad = sweep.run(hidden, weight, main_grad, wants_hidden=wants_hidden)
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = (None if saved is None else saved * upstream for saved in ctx.saved_tensors)
        return hidden_grad, weight_grad, None, None


@dataclass(frozen=True)
class _Sweep:
    """One pass over the chunks."""

    labels: Tensor
    loss_mask: Tensor
    scale: Tensor
    token_loss: TokenLoss
    chunk: int
    sequence_parallel: bool
    compile: bool
    note: Callable[[Tensor], object]

    def run(
        self, hidden: Tensor, weight: Tensor, weight_grad: Tensor | None = None, *, wants_hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The scaled loss and, if wanted, the gradient of hidden; that of the weight is added to `weight_grad`."""
        group, dtype = self.token_loss.group, statistics_dtype(hidden.dtype)
        if group is not None and self.sequence_parallel:
            hidden = finish(start_all_gather(hidden, group))
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        losses = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        upstream = self.loss_mask.to(dtype) * self.scale.to(dtype)  # [n]
        wants_gradients = wants_hidden or weight_grad is not None
        buffer = hidden.new_empty(self.chunk, len(weight))
        for start in range(0, len(hidden), self.chunk):
            tokens = slice(start, start + self.chunk)
            x = hidden[tokens]
            logits = torch.mm(x, weight.t(), out=buffer[: len(x)])  # [c, v]
            losses[tokens] = self._losses(
                logits, self.labels[tokens], upstream[tokens], wants_gradients=wants_gradients
            )
            if hidden_grad is not None:
                torch.mm(logits, weight, out=hidden_grad[tokens])
                if group is not None and tokens.stop >= len(hidden):  # the sum runs while the weight's is computed
                    start_sum = start_reduce_scatter if self.sequence_parallel else start_all_reduce
                    hidden_grad = start_sum(hidden_grad, group)
            if weight_grad is not None:
                add_transposed_product(weight_grad, logits, x)
        if group is not None and hidden_grad is not None:
            hidden_grad = finish(hidden_grad)
        self.note(losses.masked_fill_(~self.loss_mask, 0.0))
        return self.scale.to(dtype) * losses.sum(), hidden_grad

    def _losses(self, logits: Tensor, labels: Tensor, upstream: Tensor, *, wants_gradients: bool) -> Tensor:
        """The losses [c] of a chunk; if wanted, gradients in place of the logits [c, columns], by `upstream` [c]."""
        loss, compiles = self.token_loss, self.compile and self.token_loss.real > 0
        if self.compile and loss.group is None and logits.is_cuda and logits.dtype != torch.float64:
            from megalite.model.softmax_loss import softmax_losses  # imports triton

            return softmax_losses(logits, labels, upstream if wants_gradients else None, loss)
        piece = max(1, PIECE_ELEMENTS[logits.device.type] // max(1, loss.columns))  # tokens
        if compiles and logits.is_cuda:  # there are no fp32 logits that pieces would bound
            piece = self.chunk
        parts = logits.split(piece), labels.split(piece), upstream.split(piece)
        if loss.group is None and len(logits) > piece:  # no exchange: a piece gets gradients while it is in the caches
            each = [self._losses(*part, wants_gradients=wants_gradients) for part in zip(*parts, strict=True)]
            return torch.cat(each)
        logits[:, loss.real :] = -torch.inf
        compiled = _compiled if compiles else lambda step: step
        found = [
            compiled(TokenLoss.statistics)(loss, part, of_part, keeps=len(logits) <= piece)
            for part, of_part in zip(*parts[:2], strict=True)
        ]
        statistics, powers = zip(*found, strict=True)
        of_ranks = torch.cat(statistics, 1)[None]  # [t, k, r], as soon as all ranks of a group have given theirs
        if loss.group is not None:
            of_ranks = finish(start_all_gather(of_ranks, loss.group))
        losses, factors = loss.combine(of_ranks)
        if wants_gradients:
            arguments = parts[0], statistics, parts[1], factors.split(piece), parts[2], powers
            for each_ in zip(*arguments, strict=True):
                compiled(TokenLoss.differentiate)(loss, *each_)
        return losses


@cache
def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step as a kernel for its sums, one for its gradients and small ones: on CUDA three passes over logits, not ten.

    A shape always meets the same code, whatever came before it, so that a resumed run repeats what it would have been.
    """
    return torch.compile(step, fullgraph=True, dynamic=False)
