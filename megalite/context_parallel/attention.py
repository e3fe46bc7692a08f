"""Causal attention of sequences that ranks share: each computes its own queries, with the keys of all.

Ranks that exchange heads (Ulysses, arXiv 2309.14509) swap them for their parts of a block: each then has all rows of
it and its share of the heads. Where that is the whole sequence, attention is as on one rank. Else blocks see each other
by the ring or all at once (exchange.py), tile after tile (layout/sequence.py), merged by their log-sum-exp.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.context_parallel.exchange import CpGroups
from megalite.kernels.attention_mask import AttentionMask
from megalite.kernels.attention_tile import attend, attend_backward, merge_
from megalite.kernels.products import statistics_dtype
from megalite.layout.sequence import Tile, block_places
from megalite.tensor_parallel.collectives import finish, start_all_gather

Heads = tuple[Tensor, Tensor, Tensor]


def context_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ranks: CpGroups,
    mask: AttentionMask,
    whole: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Queries [n, b, groups, q_per_kv, d], keys [n, b, groups, 1, d] and values [n, b, groups, 1, e] of this rank's
    part of the sequence -> [n, b, heads * e]. `whole` is attention on whole sequences, which takes them as [s, ...]."""
    heads = queries, keys, values
    if ranks.alltoall is not None:
        heads = _heads_for_rows(*heads, ranks, ranks.alltoall.size)
    out = whole(*heads) if ranks.ring is None else _RingAttention.apply(*heads, ranks, mask)
    return out if ranks.alltoall is None else _rows_for_heads(out, ranks, ranks.alltoall.size)


def whole_sequence(x: Tensor, ranks: CpGroups) -> Tensor:
    """What the ranks have of sequences without documents, in the order of the positions: [n, ...] -> [s, ...]."""
    for group in (ranks.alltoall, ranks.ring):
        x = x if group is None else finish(start_all_gather(x, group))
    if ranks.ring is None:
        return x
    blocks = (block_places(len(x), ranks.ring.size, block, "zigzag") for block in range(ranks.ring.size))
    order = torch.tensor([place for block in blocks for each in block for place in each], device=x.device)
    return torch.empty_like(x).index_copy_(0, order, x)


def _heads_for_rows(queries: Tensor, keys: Tensor, values: Tensor, ranks: CpGroups, size: int) -> Heads:
    """[n, b, groups, ...] -> [n * a, b, groups / a, ...]; a group that ranks share goes to each of them."""
    groups, q = queries.shape[2:4]
    if groups % size:
        copies = size // groups
        queries = queries.unflatten(3, (copies, q // copies)).flatten(2, 3)
        keys, values = (part.repeat_interleave(copies, dim=2) for part in (keys, values))
    heads = queries, keys, values
    parts = torch.cat([part.flatten(3) for part in heads], dim=3)  # [n, b, groups, q_per_kv * d + d + e]
    parts = parts.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)  # [a, n, b, groups / a, ...]
    swapped = ranks.swap(parts.flatten(0, 1))
    widths = [part.shape[3] * part.shape[4] for part in heads]
    found = zip(swapped.split(widths, dim=3), heads, strict=True)
    queries, keys, values = (rows.unflatten(3, part.shape[3:]) for rows, part in found)
    return queries, keys, values


def _rows_for_heads(out: Tensor, ranks: CpGroups, size: int) -> Tensor:
    """[n * a, b, heads / a * e] -> [n, b, heads * e]"""
    parts: Tensor = ranks.swap(out).unflatten(0, (size, -1))  # [a, n, b, heads / a * e]
    return parts.permute(1, 2, 0, 3).flatten(2)


class _RingAttention(torch.autograd.Function):
    """Kept for backward are queries, keys and values of the own block, the output and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, ranks: CpGroups, mask: AttentionMask
    ) -> Tensor:
        ctx.tiles = tiles = _Tiles(mask, ranks, keys.shape[-1])
        own = _by_head(queries)
        out = torch.zeros(*own.shape[:-1], values.shape[-1], dtype=statistics_dtype(own.dtype), device=own.device)
        lse = out.new_full(out.shape[:-1], float("-inf"))
        for source, block in ranks.blocks(tiles.travelling(keys, values), tiles.plan):
            for rows, columns, sees in tiles.of(source):
                found = attend(own[:, :, rows], *tiles.keys_and_values(block[columns]), **sees)
                merge_(out[:, :, rows], lse[:, :, rows], *found)
            del block  # before the next one comes: two are there at a time
        flat = out.to(queries.dtype).permute(2, 0, 1, 3).flatten(2)  # [m, b, heads * e]
        ctx.save_for_backward(queries, keys, values, flat, lse)
        return flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, flat, lse = ctx.saved_tensors
        tiles: _Tiles = ctx.tiles
        own = _by_head(queries)  # [b, heads, m, d]
        grad, out = (x.unflatten(-1, (own.shape[1], -1)).permute(1, 2, 0, 3) for x in (grads[0], flat))  # of size e
        queries_grad = torch.zeros(own.shape, dtype=lse.dtype, device=lse.device)

        def gradient_of(source: int, block: Tensor) -> Tensor:
            total = torch.zeros(block.shape, dtype=lse.dtype, device=lse.device)
            keys_total, values_total = tiles.keys_and_values(total)
            for rows, columns, sees in tiles.of(source):
                given = grad[:, :, rows], own[:, :, rows], *tiles.keys_and_values(block[columns])
                parts = attend_backward(*given, out[:, :, rows], lse[:, :, rows], **sees)
                queries_grad[:, :, rows] += parts[0]
                keys_total[:, :, columns] += parts[1]
                values_total[:, :, columns] += parts[2]
            return total

        both = tiles.ranks.gradient(tiles.travelling(keys, values), tiles.plan, gradient_of).unsqueeze(3)
        by_group = queries_grad.to(queries.dtype).unflatten(1, queries.shape[2:4]).permute(3, 0, 1, 2, 4)
        return by_group, *both.split((keys.shape[-1], values.shape[-1]), dim=-1), None, None


class _Tiles:
    """What one rank of a ring computes of each block: the tiles of the plan, and their masks where documents cut them.
    A block travels as [m, b, groups, d + e], keys beside values."""

    def __init__(self, mask: AttentionMask, ranks: CpGroups, key_size: int) -> None:
        assert ranks.ring is not None
        assert mask.plan is not None
        self.ranks, self.plan = ranks, mask.plan
        self._documents, self._ring, self._key_size = mask.documents, ranks.ring, key_size
        self._partial = mask.plan.partial and ranks.gathers

    def travelling(self, keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat((keys, values), dim=-1).squeeze(3)

    def keys_and_values(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Views [b, groups, k, d] and [b, groups, k, e] of rows of a block."""
        by_head = block.permute(1, 2, 0, 3)
        return by_head[..., : self._key_size], by_head[..., self._key_size :]

    def of(self, source: int) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """Each tile of a block: rows of queries and of what arrives of the block, and which of these a query sees."""
        first = self.plan.fetched[source][0] if self._partial and source != self._ring.index else 0
        for tile in self.plan.tiles[source]:
            columns = slice(tile.keys[0] - first, tile.keys[1] - first)
            yield slice(*tile.queries), columns, {"causal": tile.causal, "mask": self.mask(tile, source)}

    def mask(self, tile: Tile, source: int) -> Tensor | None:
        """[b, 1, q, k], True where the query sees the key; None: everywhere, or as `causal` says."""
        if not tile.masked:
            return None
        documents, ring, cut = self._documents, self._ring, self.plan.cut
        assert documents is not None
        places = torch.arange(documents.shape[1], device=documents.device)
        queries, keys = (
            torch.cat([places[each.start : each.stop : each.step] for each in ranges])[slice(*rows)]
            for ranges, rows in (
                (block_places(len(places), ring.size, ring.index, cut), tile.queries),
                (block_places(len(places), ring.size, source, cut), tile.keys),
            )
        )
        is_same = documents[:, queries, None] == documents[:, None, keys]
        return (is_same & (queries[:, None] >= keys)).unsqueeze(1)


def _by_head(queries: Tensor) -> Tensor:
    """[m, b, groups, q_per_kv, d] -> [b, heads, m, d]"""
    return queries.permute(1, 2, 3, 0, 4).flatten(1, 2)
