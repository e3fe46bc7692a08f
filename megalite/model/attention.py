"""Causal self-attention with grouped queries: one fused projection, rotary positions, attention, output projection.

Tensor-parallel ranks divide the heads, whole groups of them where there are enough; else ranks share a group's key and
value and divide its queries (arXiv 1909.08053, section 3). Attention itself sees the whole sequence and no other rank.

Queries, key and value of a group lie side by side in the fused projection [s, b, groups, q_per_kv + 2, d] and stay in
it until attention itself, so that gradients come back as one tensor.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from megalite.config.schema import LEAST_FLEX_HEAD, ModelConfig
from megalite.context_parallel.attention import SequenceScores, context_attention
from megalite.context_parallel.exchange import ContextRanks
from megalite.kernels.causal_attention import MAX_LENGTH, causal_attention
from megalite.kernels.document_attention import DocumentRows, block_mask, dense_mask, document_attention
from megalite.kernels.dropout import DropoutKey, hash_dropout
from megalite.kernels.rotate import rotate
from megalite.launch.device import FOR_MASKS, KERNELS
from megalite.model.norm import RMSNorm
from megalite.model.parameters import GROUPS
from megalite.moe.balance import TokenMasks
from megalite.tensor_parallel.layers import ColumnParallelLinear, Placement, RowParallelLinear

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class BlockInputs:
    """What a block needs besides activations. None: no rotation; no mask but the causal one; nothing dropped."""

    rotation: tuple[Tensor, Tensor] | None = None  # of rotary_tables
    mask: "Tensor | BlockMask | DocumentRows | None" = None  # of attention_mask
    probability_dropout: DropoutKey | None = None
    attention_dropout: DropoutKey | None = None
    mlp_dropout: DropoutKey | None = None
    masks: TokenMasks | None = None  # for routers
    scores: SequenceScores | None = None  # where ranks of a ring share each sequence
    kernels: str = "auto"  # train.attention


def attention_backends(device: torch.device, inputs: BlockInputs) -> AbstractContextManager[None]:
    """Ask for CUDA's attention kernels: for the chosen one, or in order of speed."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(FOR_MASKS if isinstance(inputs.mask, Tensor) else KERNELS[inputs.kernels], set_priority=True)


def attention_mask(
    documents: Tensor | None,
    shape: tuple[int, int, int],
    like: Tensor,
    kernels: str,
    *,
    compiled: bool,
    dropout: float,
) -> "Tensor | BlockMask | DocumentRows | None":
    """What keeps attention inside `documents` [b, s], in the form that is fastest where and how the model runs.

    None: without documents, causal attention needs no mask; flex attention does. A tensor [b, 1, s, s] is added to
    the scores. `shape` is (b, s, d); `like` has dtype and device of activations; `dropout` is that of probabilities.
    """
    *batch, d = shape
    flex = like.is_cuda and compiled and not dropout and d >= LEAST_FLEX_HEAD and like.dtype != torch.float64
    if flex and (documents is not None or kernels == "flex"):
        return block_mask(like.new_zeros(batch, dtype=torch.int32) if documents is None else documents)
    if documents is None:
        return None
    if like.is_cpu and not compiled and not dropout and documents.shape[1] <= MAX_LENGTH:
        return DocumentRows.of(documents)
    return dense_mask(documents, like.dtype)


class Attention(nn.Module):
    """Queries of `num_attention_heads`, keys and values of `num_key_value_heads` heads."""

    def __init__(
        self, config: ModelConfig, place: Placement, context: ContextRanks | None = None, *, recompute: bool = False
    ) -> None:
        super().__init__()
        heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_size
        self.dropout = config.attention_dropout
        self.recompute = recompute  # backward computes all between the two projections again
        self.device, self.context = place.device, context
        outputs = (groups, heads // groups + 2, d)
        self.qkv = ColumnParallelLinear(outputs, config.hidden_size, GROUPS, place, bias=config.bias)
        self.group_shape = self.qkv.local_outputs
        self.query_norm = RMSNorm(d, config.norm_eps, place) if config.qk_norm else None
        self.key_norm = RMSNorm(d, config.norm_eps, place) if config.qk_norm else None
        self.out = RowParallelLinear(config.hidden_size, heads * d, place, bias=config.bias)

    def project(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """[n, b, h], with sequence parallelism [n/t, b, h] -> [n, b, groups, q_per_kv + 2, d]"""
        qkv: Tensor = self.qkv(x).unflatten(-1, self.group_shape)
        if self.context is None:
            return qkv
        queries, keys, values = self.normed(qkv)
        if inputs.rotation is not None:
            queries, keys = rotate(queries, *inputs.rotation), rotate(keys, *inputs.rotation)
        return torch.cat((queries, keys, values), dim=3)

    def core(self, qkv: Tensor, inputs: BlockInputs) -> Tensor:
        """All between the two projections: [n, b, groups, q_per_kv + 2, d] -> [n, b, heads * d].

        Where ranks share sequences, `project` has normed and rotated, and this is no part of a compiled graph: other
        documents are other tiles.
        """
        if self.context is None:
            as_it_is = qkv if self.query_norm is None else None
            return self._whole(self.normed(qkv), as_it_is, inputs.rotation, inputs)
        whole = partial(self.whole_projection, inputs=inputs)
        return context_attention(qkv, self.context, inputs.scores, whole)

    def normed(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self._split(qkv)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        return queries, keys, values

    def whole_projection(self, qkv: Tensor, inputs: BlockInputs) -> Tensor:
        """Attention of whole sequences, normed and rotated, as ranks have them that exchanged heads for rows."""
        return self._whole(self._split(qkv), qkv, None, inputs)

    def _whole(
        self,
        parts: tuple[Tensor, Tensor, Tensor],
        together: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        inputs: BlockInputs,
    ) -> Tensor:
        """Rotation and attention of whole sequences: queries, keys and values of `_split`, and the projection that they
        are parts of, if they are -> [s, b, heads * d]."""
        queries, keys, values = parts
        mask, dropped, on_cpu = inputs.mask, inputs.probability_dropout, queries.device.type == "cpu"
        by_blocks = on_cpu and mask is None and dropped is None and len(queries) <= MAX_LENGTH
        # A compiler makes one kernel of the rotation, and cannot trace its pieces.
        if rotation is not None and (not by_blocks or torch.compiler.is_compiling()):
            queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
            rotation = together = None
            values = values.contiguous()  # as a part of the projection they would keep all of it until backward
        if by_blocks:
            together = torch.cat((queries, keys, values), dim=3) if together is None else together
            return causal_attention(together, rotation)
        if mask is not None and not isinstance(mask, Tensor):
            return document_attention(queries, keys, values, mask)
        # Torch's kernels count as random, also without dropout. For a rebuild compiled code keeps the CPU generator's
        # state, and torch 2.13 then checks a main gradient for changes, which are what it is there for.
        rebuilt_by_compiler = self.recompute and torch.compiler.is_compiling() and on_cpu
        if dropped is not None or rebuilt_by_compiler:
            return self._attend_plainly(queries, keys, values, mask, dropped)
        queries, keys, values = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (queries, keys, values))
        out = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, enable_gqa=queries.shape[1] != keys.shape[1]
        )  # [b, heads, s, d]
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_plainly(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropped: DropoutKey | None
    ) -> Tensor:
        """The same by plain products, which keep the probabilities [b, heads, s, s], with dropout on these: the masks
        that torch's fused kernels draw depend on the layout."""
        s, d = len(queries), queries.shape[-1]
        if mask is None:
            mask = torch.full((s, s), float("-inf"), dtype=queries.dtype, device=queries.device).triu(1)
        else:
            mask = mask.unsqueeze(1)
        queries, keys, values = (
            part.permute(1, 2, 3, 0, 4) for part in (queries, keys, values)
        )  # [b, groups, heads, s, d]
        scores = (queries * d**-0.5) @ keys.transpose(-1, -2) + mask  # [b, groups, q_per_kv, s, s]
        probabilities = torch.softmax(scores, dim=-1).flatten(1, 2)
        kept = probabilities if dropped is None else hash_dropout(probabilities, self.dropout, dropped)
        return (kept.view(scores.shape) @ values).permute(3, 0, 1, 2, 4).flatten(2)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, groups, q_per_kv, d], keys and values [s, b, groups, 1, d]."""
        queries, keys, values = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
        return queries, keys, values
