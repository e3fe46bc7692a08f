"""Causal attention inside documents: work that falls with the documents, not a mask over all pairs of tokens.

A token attends to the tokens of its document up to itself. Documents are runs of neighbours, numbered upwards in each
sequence, so what a block of query rows needs are the keys from the first of its first row's document up to its last
row. On CUDA, compiled, flex attention gets that as a table of blocks, of one shape whatever the documents are: nothing
waits for the device, nothing is compiled again. On CPUs batched products over a block of rows take these keys alone.
All else (dropout on the probabilities, long sequences on a CPU, fp64 on CUDA) adds a dense mask to torch's own
attention.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:  # who imports it imports the compiler
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # rows, and on CUDA keys


@dataclass(frozen=True)
class DocumentRows:
    """`documents` [b, s] of a microbatch on a CPU, and for each block of BLOCK rows the first key that it needs."""

    documents: Tensor
    first_keys: list[int]

    @classmethod
    def of(cls, documents: Tensor) -> "DocumentRows":
        return cls(documents, _document_starts(documents)[:, ::BLOCK].amin(0).tolist())

    def hidden(self, start: int, stop: int, first: int) -> Tensor:
        """Which of the keys [first, stop) the rows [start, stop) do not see: bool [b, rows, keys]."""
        rows, keys = torch.arange(start, stop), torch.arange(first, stop)
        other = self.documents[:, start:stop, None] != self.documents[:, None, first:stop]
        return other | (keys > rows[:, None])


def dense_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a token may attend (earlier or itself, same document), else -inf: [b, s] -> [b, 1, s, s]."""
    same = documents[:, :, None] == documents[:, None, :]
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~same.tril_(), float("-inf")).unsqueeze(1)


def block_mask(documents: Tensor) -> "BlockMask":
    """Of documents [b, s]: by block of rows the blocks of keys that need a look at each pair, and those that do not."""
    from torch.nn.attention.flex_attention import BlockMask

    s = documents.shape[1]
    starts, count = _document_starts(documents), -(-s // BLOCK)
    here = torch.arange(count, device=documents.device)
    last_rows = ((here + 1) * BLOCK - 1).clamp(max=s - 1)
    first = starts[:, here * BLOCK] // BLOCK  # [b, count]
    whole = (starts[:, last_rows] + BLOCK - 1) // BLOCK  # the first block of keys that all of its rows see
    before = here < here[:, None]  # [of rows, of keys]
    needed = (here >= first[..., None]) & (before | (here == here[:, None]))  # [b, count, count]
    full = (here >= whole[..., None]) & before

    def same_document(sample: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (documents[sample, row] == documents[sample, key])

    return BlockMask.from_kv_blocks(
        *_in_order(needed & ~full), *_in_order(full), BLOCK_SIZE=BLOCK, mask_mod=same_document, seq_lengths=(s, s)
    )


def document_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: "BlockMask | DocumentRows") -> Tensor:
    """softmax(q k^T / sqrt(d)) v inside documents.

    Queries [s, b, groups, q_per_kv, d], keys and values [s, b, groups, 1, d] -> [s, b, heads * d].
    """
    if isinstance(mask, DocumentRows):
        return _ByRows.apply(queries, keys, values, mask)  # type: ignore[no-any-return]
    from torch.nn.attention.flex_attention import flex_attention

    queries, keys, values = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (queries, keys, values))
    grouped = queries.shape[1] != keys.shape[1]
    out = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=grouped)  # [b, heads, s, d]
    return out.permute(2, 0, 1, 3).flatten(2)


def _document_starts(documents: Tensor) -> Tensor:
    """Where the document of each token begins: [b, s], int64."""
    places = torch.arange(documents.shape[1], device=documents.device)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(new, places, 0).cummax(1).values


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of rows has, [b, 1, count], and their numbers first, [b, 1, count, count]."""
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), numbers.to(torch.int32).unsqueeze(1)


class _ByRows(torch.autograd.Function):
    """n = b * groups problems of q query heads on one key and one value head, a block of rows after the other."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: DocumentRows) -> Tensor:
        s, b, groups, q, d = queries.shape
        queries, keys, values = (_heads(part) for part in (queries, keys, values))  # [n, q or 1, s, d]
        keys, values = keys[:, 0], values[:, 0]
        out, kept = queries.new_empty(s, b * groups, q, d), []
        for start, stop, first in _blocks(s, mask):
            scores = _product(queries[:, :, start:stop].flatten(1, 2), keys[:, first:stop].transpose(1, 2), d**-0.5)
            hidden = mask.hidden(start, stop, first)[:, None, None]  # [b, 1, 1, rows, keys]
            scores.view(b, groups, q, *hidden.shape[-2:]).masked_fill_(hidden, float("-inf"))
            kept.append(torch.softmax(scores, dim=-1))  # [n, q * rows, keys]
            attended = (kept[-1] @ values[:, first:stop]).view(-1, q, stop - start, d)
            out[start:stop] = attended.permute(2, 0, 1, 3)
        ctx.save_for_backward(queries, keys, values, *kept)
        ctx.groups, ctx.mask = groups, mask
        return out.view(s, b, groups * q * d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, *kept = ctx.saved_tensors
        _, q, s, d = queries.shape
        grad = _heads(grads[0].view(s, -1, ctx.groups, q, d))
        grad_queries, grad_keys, grad_values = torch.empty_like(queries), *map(torch.zeros_like, (keys, values))
        for (start, stop, first), probabilities in zip(_blocks(s, ctx.mask), kept, strict=True):
            rows, their_grad = (part[:, :, start:stop].flatten(1, 2) for part in (queries, grad))  # [n, q * rows, d]
            grad_values[:, first:stop].baddbmm_(probabilities.transpose(1, 2), their_grad)
            scores = torch._softmax_backward_data(
                their_grad @ values[:, first:stop].transpose(1, 2), probabilities, -1, probabilities.dtype
            )
            grad_keys[:, first:stop].baddbmm_(scores.transpose(1, 2), rows, alpha=d**-0.5)
            of_rows = _product(scores, keys[:, first:stop], d**-0.5)
            grad_queries[:, :, start:stop] = of_rows.view(-1, q, stop - start, d)
        found = (grad_queries, grad_keys.unsqueeze(1), grad_values.unsqueeze(1))
        return *(part.permute(2, 0, 1, 3).unflatten(1, (-1, ctx.groups)) for part in found), None


def _heads(x: Tensor) -> Tensor:
    """[s, b, groups, q, d] -> [b * groups, q, s, d], in one piece."""
    return x.flatten(1, 2).permute(1, 2, 0, 3).contiguous()


def _product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """factor * left @ right, batched; in bf16 the factor costs no rounding."""
    return left.new_empty(*left.shape[:2], right.shape[2]).baddbmm_(left, right, beta=0, alpha=factor)


def _blocks(s: int, mask: DocumentRows) -> list[tuple[int, int, int]]:
    """The first row of each block, the one behind its last, and its first key."""
    return [(at * BLOCK, min((at + 1) * BLOCK, s), first) for at, first in enumerate(mask.first_keys)]
