"""softmax(q k^T / sqrt(d)) v of whole sequences, by the fastest kernel that takes the mask, the device and the sizes.

Queries [s, b, groups, q_per_kv, d], keys [s, b, groups, 1, d] and values [s, b, groups, 1, e] give [s, b, heads * e].
The size e of values may differ from d.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.kernels.attention_mask import BLOCK, MAX_ROWS, AttentionMask, DocumentRows
from megalite.kernels.dropout import DropoutKey, hash_dropout

TILE_ELEMENTS = 1 << 24  # logits that `raise_largest` has at a time, unless one row has more


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: AttentionMask,
    dropout: tuple[float, DropoutKey] | None = None,
    *,
    plain: bool = False,
) -> Tensor:
    """`dropout`: the share of probabilities that are dropped, and which. `plain`: without a kernel of torch's."""
    form = mask.form
    by_rows = form is None and dropout is None and queries.is_cpu and len(queries) <= MAX_ROWS
    if by_rows or isinstance(form, DocumentRows):
        return _ByRows.apply(queries, keys, values, form)  # type: ignore[no-any-return]
    if dropout is not None or plain:
        return _plain_attention(queries, keys, values, form if isinstance(form, Tensor) else None, dropout)
    queries, keys, values = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (queries, keys, values))
    grouped = queries.shape[1] != keys.shape[1]
    if form is None or isinstance(form, Tensor):
        out = F.scaled_dot_product_attention(
            queries, keys, values, form, is_causal=form is None, enable_gqa=grouped
        )  # [b, heads, s, e]
    else:
        from torch.nn.attention.flex_attention import flex_attention

        out = flex_attention(queries, keys, values, block_mask=form, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3).flatten(2)


def _plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropout: tuple[float, DropoutKey] | None
) -> Tensor:
    """The same by plain products, which keep the probabilities [b, heads, s, s], with dropout on these: the masks that
    torch's fused kernels draw depend on the layout."""
    s, d = len(queries), queries.shape[-1]
    if mask is None:
        mask = torch.full((s, s), float("-inf"), dtype=queries.dtype, device=queries.device).triu(1)
    else:
        mask = mask.unsqueeze(1)
    queries, keys, values = (part.permute(1, 2, 3, 0, 4) for part in (queries, keys, values))  # [b, groups, q, s, d]
    scores = (queries * d**-0.5) @ keys.transpose(-1, -2) + mask  # [b, groups, q_per_kv, s, s]
    probabilities = torch.softmax(scores, dim=-1).flatten(1, 2)
    if dropout is not None:
        share, key = dropout
        probabilities = hash_dropout(probabilities, share, key)
    return (probabilities.view(scores.shape) @ values).permute(3, 0, 1, 2, 4).flatten(2)


def raise_largest(
    largest: Tensor, queries: Tensor, keys: Tensor, places: Tensor, key_places: Tensor, documents: Tensor | None
) -> None:
    """Raise largest [groups] to the largest logit (q k / sqrt(d), before the softmax) that a query of each group sees.

    Queries [n, b, groups, q_per_kv, d] at `places` [n] see keys [m, b, groups, 1, d] at `key_places` [m] of their
    document of `documents` [b, s], up to themselves. Where m = n both are in order. Logits are there tile by tile.
    """
    (n, b, groups, q, d), m = queries.shape, len(keys)
    size = min(BLOCK, max(1, TILE_ELEMENTS // (b * groups * q * m)))
    queries, keys = _heads(queries), _heads(keys)[:, 0]  # [b * groups, q, n, d], [b * groups, m, d]
    for start in range(0, n, size):
        stop = min(start + size, n)
        first, last = (start if documents is None else 0, stop) if n == m else (0, m)
        logits = _product(_rows(queries, start, stop), _part(keys, 0, last).transpose(1, 2), d**-0.5)
        logits = logits.view(b, groups, q, stop - start, last)
        rows, columns = places[start:stop, None], key_places[first:last]
        hidden = columns > rows
        if documents is not None:
            hidden = (hidden | (documents[:, rows] != documents[:, None, columns]))[:, None, None]
        logits[..., first:].masked_fill_(hidden, float("-inf"))
        found = logits.amax((0, 2, 3, 4)).clamp(max=torch.finfo(logits.dtype).max)  # that fp16 overflows to
        torch.maximum(largest, found.to(largest.dtype), out=largest)


# A compiler would unroll the tiles.
compiled_raise_largest = torch.library.custom_op("megalite::raise_largest", raise_largest, mutates_args=("largest",))
_copy = torch.library.custom_op("megalite::copy", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
_copy.register_fake(torch.empty_like)


def apart(x: Tensor) -> Tensor:
    """x without a gradient. To a compiler it is another tensor: what is made of it is not what backward rebuilds."""
    return _copy(x.detach()) if torch.compiler.is_compiling() else x.detach()


class _ByRows(torch.autograd.Function):
    """Causal attention on CPUs by blocks of query rows: each block sees the keys that its rows need and no others.

    torch's CPU flash kernel spends most of its bf16 time outside matrix products; batched products over one block of
    rows, with the probabilities kept for backward, take 0.4 to 0.55 of its time in bf16 and 0.85 to 0.95 in fp32 (256
    to 1024 tokens, heads of 64, one core with AVX-512). The probabilities grow with s^2 / 2. Work falls with the
    documents. n = b * groups problems are independent, each with q = q_per_kv query heads on one key and value head.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, documents: DocumentRows | None) -> Tensor:
        s, b, groups, q, d = queries.shape
        queries, keys, values = _heads(queries), _heads(keys)[:, 0], _heads(values)[:, 0]  # [n, q, s, d], [n, s, d | e]
        out, kept = queries.new_empty(s, b * groups, q, values.shape[-1]), []
        future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=queries.dtype).triu_(1)
        for start, stop, first in _blocks(s, documents):
            rows = stop - start
            scores = _product(_rows(queries, start, stop), _part(keys, first, stop).transpose(1, 2), d**-0.5)
            if documents is None:
                scores.view(-1, q, rows, stop)[..., start:] += future[:rows, :rows]
            else:
                hidden = documents.hidden(start, stop, first)[:, None, None]  # [b, 1, 1, rows, keys]
                scores.view(b, groups, q, *hidden.shape[-2:]).masked_fill_(hidden, float("-inf"))
            kept.append(torch.softmax(scores, dim=-1))  # [n, q * rows, keys]
            attended = (kept[-1] @ _part(values, first, stop)).view(-1, q, rows, out.shape[-1])
            out[start:stop] = attended.permute(2, 0, 1, 3)
        ctx.save_for_backward(queries, keys, values, *kept)
        ctx.groups, ctx.documents = groups, documents
        return out.view(s, b, -1)  # `out` itself would not do: see _drop in dropout.py

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *kept = ctx.saved_tensors
        n, q, s, d = queries.shape
        grad = _heads(grads[0].view(s, n // ctx.groups, ctx.groups, q, -1))  # [n, q, s, e]
        grad_queries, grad_keys, grad_values = torch.empty_like(queries), *map(torch.zeros_like, (keys, values))
        for (start, stop, first), probabilities in zip(_blocks(s, ctx.documents), kept, strict=True):
            row_queries, row_grad = _rows(queries, start, stop), _rows(grad, start, stop)  # [n, q * rows, d | e]
            grad_values[:, first:stop].baddbmm_(probabilities.transpose(1, 2), row_grad)
            grad_scores = torch._softmax_backward_data(
                row_grad @ _part(values, first, stop).transpose(1, 2), probabilities, -1, probabilities.dtype
            )
            grad_keys[:, first:stop].baddbmm_(grad_scores.transpose(1, 2), row_queries, alpha=d**-0.5)
            row_grad_queries = _product(grad_scores, _part(keys, first, stop), d**-0.5)
            grad_queries[:, :, start:stop] = row_grad_queries.view(n, q, stop - start, d)
        found = (grad_queries, grad_keys.unsqueeze(1), grad_values.unsqueeze(1))
        return *(part.permute(2, 0, 1, 3).unflatten(1, (-1, ctx.groups)) for part in found), None


def _heads(x: Tensor) -> Tensor:
    """[s, b, groups, q, d] -> [b * groups, q, s, d], a copy in one piece."""
    return x.flatten(1, 2).permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows start..stop of all query heads of a group, one after the other: [n, q, s, d] -> [n, q * rows, d]."""
    return x[:, :, start:stop].flatten(1, 2)


def _part(x: Tensor, first: int, stop: int) -> Tensor:
    """Rows of [n, s, d], in one piece: a batched product copies all else, if transposed slowly."""
    return x[:, first:stop].contiguous()


def _product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """factor * left @ right, batched; the factor costs nothing and, in bf16, no rounding."""
    return left.new_empty(*left.shape[:2], right.shape[2]).baddbmm_(left, right, beta=0, alpha=factor)


def _blocks(s: int, documents: DocumentRows | None) -> list[tuple[int, int, int]]:
    """The first row of each block, the last + 1, and the first key."""
    starts = range(0, s, BLOCK)
    firsts = [0] * len(starts) if documents is None else documents.first_keys
    return [(start, min(start + BLOCK, s), first) for start, first in zip(starts, firsts, strict=True)]
