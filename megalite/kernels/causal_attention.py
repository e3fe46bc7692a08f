"""Causal attention on CPUs, by blocks of query rows: each block sees the keys up to its last row and no others.

torch's CPU flash kernel spends most of its bf16 time outside matrix products; batched products over one block of rows,
with the probabilities kept for backward, take 0.4 to 0.55 of its time in bf16 and 0.85 to 0.95 in fp32 (256 to 1024
tokens, heads of 64, one core with AVX-512). What is kept grows with s^2 / 2: sequences beyond MAX_LENGTH are left to
torch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.kernels.rotate import rotate_heads_

BLOCK = 128  # query rows; the probabilities of one block stay near the cache
MAX_LENGTH = 1024


def causal_attention(qkv: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """softmax(causal q k^T / sqrt(d)) v of the fused [s, b, groups, q_per_kv + 2, d] -> [s, b, heads * d].

    With a `rotation`, of rotary_tables, queries and keys are turned by it first.
    """
    return _CausalAttention.apply(qkv, *(rotation or (None, None)))  # type: ignore[no-any-return]


class _CausalAttention(torch.autograd.Function):
    """n = b * groups independent problems, each with q = q_per_kv query heads on one key and one value head."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, straight: Tensor | None, swapped: Tensor | None) -> Tensor:
        s, b, groups, q_and_kv, d = qkv.shape
        q = q_and_kv - 2
        heads = qkv.reshape(s, b * groups, q + 2, d).permute(1, 2, 0, 3)  # [n, q + 2, s, d]
        parts = (heads[:, :q], heads[:, q], heads[:, q + 1])
        queries, keys, values = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        _rotate(queries, keys, b, straight, swapped, 1)
        out = qkv.new_empty(s, b * groups, q, d)
        future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=qkv.dtype).triu_(1)
        kept = []
        for start, stop in _blocks(s):
            rows = stop - start
            scores = _product(_rows(queries, start, stop), _upto(keys, stop).transpose(1, 2), d**-0.5)
            scores.view(-1, q, rows, stop)[..., start:] += future[:rows, :rows]
            probabilities = torch.softmax(scores, dim=-1)  # [n, q * rows, stop]
            kept.append(probabilities)
            out[start:stop] = (probabilities @ _upto(values, stop)).view(-1, q, rows, d).permute(2, 0, 1, 3)
        ctx.save_for_backward(queries, keys, values, straight, swapped, *kept)
        ctx.shape = qkv.shape
        return out.view(s, b, groups * q * d)  # `out` itself would not do: see _drop in dropout.py

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        queries, keys, values, straight, swapped, *kept = ctx.saved_tensors
        s, b, groups, q_and_kv, d = ctx.shape
        q = q_and_kv - 2
        grad = grads[0].reshape(s, b * groups, q, d).permute(1, 2, 0, 3).contiguous()  # [n, q, s, d]
        grad_queries, grad_keys, grad_values = (torch.empty_like(part) for part in (queries, keys, values))
        # The last block sees all keys: its products start the sums to which the blocks before it add.
        for (start, stop), probabilities in reversed(list(zip(_blocks(s), kept, strict=True))):
            add = float(stop < s)
            block_grad, block_queries = _rows(grad, start, stop), _rows(queries, start, stop)  # [n, q * rows, d]
            grad_values[:, :stop].baddbmm_(probabilities.transpose(1, 2), block_grad, beta=add)
            grad_scores = torch._softmax_backward_data(
                block_grad @ _upto(values, stop).transpose(1, 2), probabilities, -1, probabilities.dtype
            )
            grad_keys[:, :stop].baddbmm_(grad_scores.transpose(1, 2), block_queries, beta=add, alpha=d**-0.5)
            block_grad_queries = _product(grad_scores, _upto(keys, stop), d**-0.5)
            grad_queries[:, :, start:stop] = block_grad_queries.view(-1, q, stop - start, d)
        _rotate(grad_queries, grad_keys, b, straight, swapped, -1)
        grad_qkv = grad.new_empty(ctx.shape)
        grad_heads = grad_qkv.view(s, b * groups, q + 2, d).permute(1, 2, 0, 3)
        grad_heads[:, :q], grad_heads[:, q], grad_heads[:, q + 1] = grad_queries, grad_keys, grad_values
        return grad_qkv, None, None


def _rotate(queries: Tensor, keys: Tensor, b: int, straight: Tensor | None, swapped: Tensor | None, sign: int) -> None:
    """queries [b * groups, q, s, d] and keys [b * groups, s, d] in place, or back."""
    if straight is not None and swapped is not None:
        for heads in (queries, keys):
            rotate_heads_(heads.view(b, -1, *heads.shape[-2:]), straight, swapped, sign)


def _blocks(s: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, s)) for start in range(0, s, BLOCK)]


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows start..stop of all query heads of a group, one after the other: [n, q, s, d] -> [n, q * rows, d]."""
    return x[:, :, start:stop].flatten(1, 2)


def _upto(x: Tensor, stop: int) -> Tensor:
    """The first rows of [n, s, d], in one piece: a batched product copies all else, if transposed slowly."""
    return x[:, :stop].contiguous()


def _product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """factor * left @ right, batched; the factor costs nothing and, in bf16, no rounding."""
    out = left.new_empty(*left.shape[:2], right.shape[2])
    return out.baddbmm_(left, right, beta=0, alpha=factor)
