"""Causal attention of sequences that ranks share: each computes its own queries, with the keys of all.

Ranks that exchange heads (Ulysses, arXiv 2309.14509) swap them for their parts of a block: each then has all rows of
it and its share of the heads. Where that is the whole sequence, attention is as on one rank. Else blocks see each other
by the ring or all at once (exchange.py), tile after tile (layout/sequence.py), merged by their log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.context_parallel.exchange import ContextRanks
from megalite.kernels.attention_tile import attend, attend_backward, merge_
from megalite.kernels.pieces import statistics_dtype
from megalite.layout.sequence import AttentionPlan, Tile, block_places
from megalite.tensor_parallel.collectives import finish, start_all_gather


@dataclass(frozen=True)
class SequenceScores:
    """What decides which scores of a microbatch count: the plan and, of packed documents, the number of each token's
    document [b, s of the whole sequence]."""

    plan: AttentionPlan
    documents: Tensor | None = None


def context_attention(
    qkv: Tensor, ranks: ContextRanks, scores: SequenceScores | None, whole: Callable[[Tensor], Tensor]
) -> Tensor:
    """[n, b, groups, q_per_kv + 2, d] of this rank's part of the sequence -> [n, b, heads * d].

    `whole` is attention on whole sequences, which takes [s, b, ...]; `scores` are for ranks with a ring.
    """
    if ranks.alltoall is not None:
        qkv = _heads_for_rows(qkv, ranks, ranks.alltoall.size)
    if ranks.ring is None:
        out = whole(qkv)
    else:
        assert scores is not None
        out = _RingAttention.apply(qkv, ranks, scores)
    return out if ranks.alltoall is None else _rows_for_heads(out, ranks, ranks.alltoall.size)


def whole_sequence(x: Tensor, ranks: ContextRanks) -> Tensor:
    """What the ranks have of sequences without documents, in the order of the places: [n, ...] -> [s, ...]."""
    for group in (ranks.alltoall, ranks.ring):
        x = x if group is None else finish(start_all_gather(x, group))
    if ranks.ring is None:
        return x
    blocks = (block_places(len(x), ranks.ring.size, block, "zigzag") for block in range(ranks.ring.size))
    places = [place for block in blocks for each in block for place in each]
    order = torch.tensor(places, device=x.device)
    return torch.empty_like(x).index_copy_(0, order, x)


def _heads_for_rows(qkv: Tensor, ranks: ContextRanks, size: int) -> Tensor:
    """[n, b, groups, q_per_kv + 2, d] -> [n * a, b, groups / a, ...]; a group that ranks share goes to each of them."""
    groups, q = qkv.shape[2], qkv.shape[3] - 2
    if groups % size:
        copies = size // groups
        queries, keys_values = qkv[..., :-2, :].unflatten(3, (copies, q // copies)), qkv[..., -2:, :].unsqueeze(3)
        qkv = torch.cat((queries, keys_values.expand(-1, -1, -1, copies, -1, -1)), dim=4).flatten(2, 3)
    parts = qkv.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4, 5)  # [a, n, b, groups / a, q_per_kv + 2, d]
    swapped: Tensor = _Swap.apply(parts.flatten(0, 1), ranks)
    return swapped


def _rows_for_heads(out: Tensor, ranks: ContextRanks, size: int) -> Tensor:
    """[n * a, b, heads / a * d] -> [n, b, heads * d]"""
    parts: Tensor = _Swap.apply(out, ranks).unflatten(0, (size, -1))  # [a, n, b, heads / a * d]
    return parts.permute(1, 2, 0, 3).flatten(2)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.swap(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.swap(grads[0]), None


class _RingAttention(torch.autograd.Function):
    """Kept for backward are the queries and keys of the own block, the output and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, ranks: ContextRanks, scores: SequenceScores) -> Tensor:
        queries, keys_values = _split(qkv)  # [b, heads, m, d], [m, b, groups, 2, d]
        masks = _Masks(scores, ranks)
        out = torch.zeros(queries.shape, dtype=statistics_dtype(qkv.dtype), device=qkv.device)
        lse = out.new_full(queries.shape[:-1], float("-inf"))

        def add(source: int, block: Tensor) -> None:
            first = masks.first(source)
            for tile in scores.plan.tiles[source]:
                rows, columns = slice(*tile.queries), slice(*(place - first for place in tile.keys))
                keys, values = _heads(block[columns])
                found = attend(queries[:, :, rows], keys, values, causal=tile.causal, mask=masks.of(tile, source))
                merge_(out[:, :, rows], lse[:, :, rows], *found)

        for source, block in ranks.blocks(keys_values, scores.plan):
            add(source, block)
            del block  # before the next one comes: two are there at a time
        ctx.ranks, ctx.scores = ranks, scores
        flat = out.to(qkv.dtype).permute(2, 0, 1, 3).flatten(2)  # [m, b, heads * d]
        ctx.save_for_backward(qkv, flat, lse)
        return flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        qkv, flat, lse = ctx.saved_tensors
        ranks, scores = ctx.ranks, ctx.scores
        queries, keys_values = _split(qkv)
        heads, d = queries.shape[1], queries.shape[-1]
        grad, out = (x.unflatten(-1, (heads, d)).permute(1, 2, 0, 3) for x in (grads[0], flat))  # [b, heads, m, d]
        masks = _Masks(scores, ranks)
        queries_grad = torch.zeros(queries.shape, dtype=lse.dtype, device=lse.device)

        def gradient_of(source: int, block: Tensor) -> Tensor:
            first = masks.first(source)
            total = torch.zeros(block.shape, dtype=lse.dtype, device=lse.device)
            keys_total, values_total = _heads(total)
            for tile in scores.plan.tiles[source]:
                rows, columns = slice(*tile.queries), slice(*(place - first for place in tile.keys))
                keys, values = _heads(block[columns])
                parts = attend_backward(
                    grad[:, :, rows],
                    queries[:, :, rows],
                    keys,
                    values,
                    out[:, :, rows],
                    lse[:, :, rows],
                    causal=tile.causal,
                    mask=masks.of(tile, source),
                )
                queries_grad[:, :, rows] += parts[0]
                keys_total[:, :, columns] += parts[1]
                values_total[:, :, columns] += parts[2]
            return total

        keys_values_grad = ranks.gradient(keys_values, scores.plan, gradient_of)
        groups = qkv.shape[2]
        by_group = queries_grad.to(qkv.dtype).unflatten(1, (groups, -1)).permute(3, 0, 1, 2, 4)
        return torch.cat((by_group, keys_values_grad), dim=3), None, None


class _Masks:
    """Of the tiles that documents cut: queries are the own block's, keys another's."""

    def __init__(self, scores: SequenceScores, ranks: ContextRanks) -> None:
        assert ranks.ring is not None
        self._plan, self._documents, self._ring = scores.plan, scores.documents, ranks.ring
        self._partial = scores.plan.partial and ranks.gathers

    def first(self, source: int) -> int:
        """The row of its block that arrives first from `source`."""
        return self._plan.fetched[source][0] if self._partial and source != self._ring.index else 0

    def of(self, tile: Tile, source: int) -> Tensor | None:
        """[b, 1, q, k], True where the query sees the key; None: everywhere, or as `causal` says."""
        if not tile.masked:
            return None
        (query_places, own), (key_places, other) = (
            (places[slice(*rows)], documents[:, slice(*rows)])
            for (places, documents), rows in (
                (self._block(self._ring.index), tile.queries),
                (self._block(source), tile.keys),
            )
        )
        return ((own[:, :, None] == other[:, None, :]) & (query_places[:, None] >= key_places)).unsqueeze(1)

    def _block(self, index: int) -> tuple[Tensor, Tensor]:
        """The places of a block [m] and their documents [b, m]."""
        assert self._documents is not None
        length, device = self._documents.shape[1], self._documents.device
        ranges = block_places(length, self._ring.size, index, self._plan.cut)
        places = torch.cat([torch.arange(each.start, each.stop, each.step, device=device) for each in ranges])
        documents = [self._documents[:, each.start : each.stop : each.step] for each in ranges]
        return places, torch.cat(documents, dim=1)


def _split(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [b, heads, m, d], keys and values [m, b, groups, 2, d] of the fused projection."""
    queries = qkv[..., :-2, :].permute(1, 2, 3, 0, 4).flatten(1, 2)
    return queries, qkv[..., -2:, :].contiguous()


def _heads(block: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values [b, groups, k, d] of [k, b, groups, 2, d]."""
    keys, values = block.permute(3, 1, 2, 0, 4).unbind()
    return keys, values
