"""The head and the cross entropy as one function that never holds fp32 logits of all tokens.

Tokens are taken in chunks, whose logits exist one chunk at a time in the compute dtype (two where ranks share the
vocabulary, whose exchanges overlap), and only a small piece in fp32. Statistics are fp32 (fp64 in fp64) whatever the
compute dtype. Gradients are taken chunk by chunk in the forward pass, so that nothing as large as logits waits for
backward. The padding of the vocabulary has probability zero and a gradient of exactly zero.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.kernels.pieces import statistics_dtype
from megalite.kernels.products import add_transposed_product
from megalite.tensor_parallel.collectives import finish, start_all_gather, start_all_reduce, start_reduce_scatter
from megalite.tensor_parallel.cross_entropy import PIECE_ELEMENTS, TokenLoss

# Tokens per chunk; on a CPU at least so many, and as many as CHUNK_BYTES hold. Each chunk reads and writes the whole
# gradient of the weight once, so chunks must be long. With 50,000 columns a CPU gains nothing from more than these, and
# CUDA needs larger products to be busy.
CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
CHUNK_BYTES = 16 << 20  # of logits, on a CPU: more tokens of a small vocabulary (4,096, bf16: 2,048 in 0.8 of the time)


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
) -> Tensor:
    """scale * sum over unmasked tokens of the `token_loss` of hidden weight^T: a 0-d fp32 (fp64) tensor.

    hidden [n, h]; weight [P, h], P the padded vocabulary; labels int64 [n], within the vocabulary also where masked;
    loss_mask bool [n]; scale 0-d, a constant to autograd. With a group of t ranks, weight is rows
    [i * P // t, (i + 1) * P // t) of rank i; all else is the same on every rank, bit for bit. With `sequence_parallel`
    hidden, and its gradient, is the rank's rows [i * n / t, (i + 1) * n / t) alone.

    With `main_grad` (fp32 or fp64, like weight) the gradient of the weight is added to it in this very call: right only
    where the returned value itself is the root of backward, with an upstream gradient of one (factors go into `scale`).
    """
    assert token_loss.group is not None or not sequence_parallel
    n = hidden.shape[0] * (token_loss.size if sequence_parallel else 1)
    assert weight.shape == (token_loss.columns, hidden.shape[1])
    assert labels.shape == loss_mask.shape == (n,)
    chunk = max(1, min(n, chunk_tokens or _default_chunk(weight, token_loss)))
    sweep = _Sweep(labels, loss_mask, scale, token_loss, chunk, sequence_parallel, compile)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, sweep, main_grad)
        return loss
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


@dataclass
class _Sweep:
    """One pass over the chunks. What `run` sets ends with it."""

    labels: Tensor
    loss_mask: Tensor
    scale: Tensor
    token_loss: TokenLoss
    chunk: int
    sequence_parallel: bool
    compile: bool

    def run(
        self, hidden: Tensor, weight: Tensor, weight_grad: Tensor | None = None, *, wants_hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The scaled loss and, if wanted, the gradient of hidden; that of the weight is added to `weight_grad`."""
        self.group = self.token_loss.group
        compiled = _compiled if self.compile and self.token_loss.real else lambda step: step
        self.losses_of, self.statistics_of = compiled(TokenLoss.losses), compiled(TokenLoss.statistics)
        self.differentiate = compiled(TokenLoss.differentiate)
        if self.group is not None and self.sequence_parallel:
            hidden = finish(start_all_gather(hidden, self.group))
        self.hidden, self.weight, self.weight_grad = hidden, weight, weight_grad
        self.hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        self.wants_gradients = wants_hidden or weight_grad is not None
        ahead = self.group is not None and self.wants_gradients  # the next chunk's logits stand beside this one's
        buffers = hidden.new_empty(2 if ahead else 1, self.chunk, weight.shape[0])
        self.one_kernel = self.compile and self.group is None and hidden.is_cuda and hidden.dtype != torch.float64
        self.piece = max(1, min(self.chunk, PIECE_ELEMENTS[hidden.device.type] // max(1, weight.shape[0])))  # tokens
        dtype = statistics_dtype(hidden.dtype)
        if self.compile and self.token_loss.real:  # there are no fp32 logits that pieces would bound
            self.piece = self.chunk if hidden.is_cuda else self.piece
        elif hidden.is_cpu:  # fresh pages cost a CPU more than the arithmetic
            self.token_loss.work = torch.empty(self.piece, weight.shape[0], dtype=dtype)
        self.losses = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        self.upstream = self.loss_mask.to(dtype) * self.scale.to(dtype)  # [n]
        waiting: tuple[slice, Tensor, Tensor] | None = None
        for number, start in enumerate(range(0, hidden.shape[0], self.chunk)):
            tokens = slice(start, start + self.chunk)
            x = hidden[tokens]
            logits = torch.mm(x, weight.t(), out=buffers[number % len(buffers), : len(x)])  # [c, v]
            if not self.one_kernel:
                logits[:, self.token_loss.real :] = -torch.inf
            if self.group is None:
                self._finish_alone(tokens, logits)
                continue
            exchanged = self.token_loss.start_exchange(self._statistics(tokens, logits))
            if waiting is not None:
                self._finish_exchanged(*waiting)
            waiting = tokens, logits, exchanged
        if waiting is not None:
            self._finish_exchanged(*waiting)
        if self.group is not None and self.hidden_grad is not None:
            self.hidden_grad = finish(self.hidden_grad)
        self.token_loss.work = None
        loss = self.scale.to(self.losses.dtype) * self.losses.masked_fill_(~self.loss_mask, 0.0).sum()
        return loss, self.hidden_grad

    def _finish_alone(self, tokens: slice, logits: Tensor) -> None:
        """Losses of a chunk whose logits are all here, and gradients in their place: one softmax serves both."""
        for rows, part in self._pieces(tokens, logits):
            upstream = self.upstream[rows] if self.wants_gradients else None
            if self.one_kernel:
                from megalite.model.softmax_loss import softmax_losses  # imports triton

                self.losses[rows] = softmax_losses(part, self.labels[rows], upstream, self.token_loss)
            else:
                self.losses[rows] = self.losses_of(self.token_loss, part, self.labels[rows], upstream)
        self._add_gradients(tokens, logits)

    def _statistics(self, tokens: slice, logits: Tensor) -> Tensor:
        """[k, c] of this rank's columns."""
        parts = self._pieces(tokens, logits)
        own = [self.statistics_of(self.token_loss, part, self.labels[rows]) for rows, part in parts]
        return torch.cat(own, 1)

    def _finish_exchanged(self, tokens: slice, logits: Tensor, exchanged: Tensor) -> None:
        """Losses of a chunk from the statistics of all ranks, and gradients in place of the logits."""
        assert self.group is not None
        statistics = finish(exchanged)  # [t, k, c]
        self.losses[tokens], factors = self.token_loss.combine(statistics)
        if not self.wants_gradients:
            return
        per_piece = statistics[self.group.index].split(self.piece, 1), factors.split(self.piece)
        for (rows, part), own, factor in zip(self._pieces(tokens, logits), *per_piece, strict=True):
            self.differentiate(self.token_loss, part, own, self.labels[rows], factor, self.upstream[rows])
        self._add_gradients(tokens, logits)

    def _add_gradients(self, tokens: slice, gradient: Tensor) -> None:
        """From the gradient [c, v] of a chunk's logits. The last sum over ranks runs while the weight's is computed."""
        if self.hidden_grad is not None:
            torch.mm(gradient, self.weight, out=self.hidden_grad[tokens])
            if self.group is not None and tokens.stop >= self.hidden.shape[0]:
                start_sum = start_reduce_scatter if self.sequence_parallel else start_all_reduce
                self.hidden_grad = start_sum(self.hidden_grad, self.group)
        if self.weight_grad is not None:
            add_transposed_product(self.weight_grad, gradient, self.hidden[tokens])

    def _pieces(self, tokens: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for first, part in enumerate(logits.split(self.piece)):
            start = tokens.start + first * self.piece
            yield slice(start, start + len(part)), part


@cache
def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step as a kernel for its sums, one for its gradients and small ones: on CUDA three passes over logits, not ten.

    A shape always meets the same code, whatever came before it, so that a resumed run repeats what it would have been.
    """
    return torch.compile(step, fullgraph=True, dynamic=False)
