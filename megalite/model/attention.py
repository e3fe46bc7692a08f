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
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config.schema import ModelConfig
from megalite.kernels.causal_attention import MAX_LENGTH, causal_attention
from megalite.kernels.document_attention import DocumentRows, block_mask, dense_mask, document_attention
from megalite.kernels.dropout import DropoutKey, hash_dropout
from megalite.kernels.rotate import rotate
from megalite.model.norm import RMSNorm
from megalite.model.parameters import GROUPS
from megalite.model.recompute import checkpoint_without_output
from megalite.moe.balance import TokenMasks
from megalite.tensor_parallel.layers import ColumnParallelLinear, Placement, RowParallelLinear

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# With a mask, cuDNN's backward gives NaN for some shapes on Hopper (https://github.com/pytorch/pytorch/issues/196678).
FOR_MASKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# By train.attention, torch's kernels in the order in which they are tried. On Hopper cuDNN runs at 1.7 to 2.3 times
# flash, torch's own first choice.
KERNELS = {
    "auto": [SDPBackend.CUDNN_ATTENTION, *FOR_MASKS],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "flex": FOR_MASKS,  # where flex attention cannot be: not compiled, or with dropout on the probabilities
}


@dataclass(frozen=True)
class BlockInputs:
    """What a block needs besides activations. None: no rotation; no mask but the causal one; nothing dropped."""

    rotation: tuple[Tensor, Tensor] | None = None  # of rotary_tables
    mask: "Tensor | BlockMask | DocumentRows | None" = None  # of attention_mask
    probability_dropout: DropoutKey | None = None
    attention_dropout: DropoutKey | None = None
    mlp_dropout: DropoutKey | None = None
    masks: TokenMasks | None = None  # for routers
    kernels: str = "auto"  # train.attention


def attention_backends(device: torch.device, inputs: BlockInputs) -> AbstractContextManager[None]:
    """Ask for CUDA's attention kernels: for the chosen one, or in order of speed."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(FOR_MASKS if isinstance(inputs.mask, Tensor) else KERNELS[inputs.kernels], set_priority=True)


def attention_mask(
    documents: Tensor | None, like: Tensor, kernels: str, *, compiled: bool, dropout: float
) -> "Tensor | BlockMask | DocumentRows | None":
    """What keeps attention inside `documents` [b, s], in the form that is fastest where and how the model runs.

    None: without documents, causal attention needs no mask; flex attention does. A tensor [b, 1, s, s] is added to the
    scores. `like` [s, b, h] has dtype and device of the activations; `dropout` is that of the probabilities.
    """
    if like.is_cuda and compiled and not dropout and (documents is not None or kernels == "flex"):
        return block_mask(like.new_zeros(like.shape[1::-1], dtype=torch.int32) if documents is None else documents)
    if documents is None:
        return None
    if like.is_cpu and not compiled and not dropout and documents.shape[1] <= MAX_LENGTH:
        return DocumentRows.of(documents)
    return dense_mask(documents, like.dtype)


class Attention(nn.Module):
    """Queries of `num_attention_heads`, keys and values of `num_key_value_heads` heads."""

    def __init__(self, config: ModelConfig, place: Placement, *, recompute: bool = False) -> None:
        super().__init__()
        heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_size
        assert groups is not None
        assert d is not None
        assert config.attention_dropout is not None
        self.dropout = config.attention_dropout
        self.recompute = recompute  # backward computes all between the two projections again
        self.device = place.device
        outputs = (groups, heads // groups + 2, d)
        self.qkv = ColumnParallelLinear(outputs, config.hidden_size, GROUPS, place, bias=config.bias)
        self.group_shape = self.qkv.local_outputs
        self.query_norm = RMSNorm(d, config.norm_eps, place) if config.qk_norm else None
        self.key_norm = RMSNorm(d, config.norm_eps, place) if config.qk_norm else None
        self.out = RowParallelLinear(config.hidden_size, heads * d, place, bias=config.bias)

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        qkv = self.qkv(x).unflatten(-1, self.group_shape)  # [s, b, groups, q_per_kv + 2, d]
        core = partial(self._core, inputs=inputs)
        backends = partial(attention_backends, self.device, inputs)
        out: Tensor = checkpoint_without_output(core, self.out, qkv, recompute=self.recompute, around=backends)
        return out

    def _core(self, qkv: Tensor, inputs: BlockInputs) -> Tensor:
        """[s, b, groups, q_per_kv + 2, d] -> [s, b, heads * d]: norms, rotation and attention."""
        queries, keys, values = self._split(qkv)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        rotation, mask, dropped = inputs.rotation, inputs.mask, inputs.probability_dropout
        by_blocks = qkv.device.type == "cpu" and mask is None and dropped is None and len(qkv) <= MAX_LENGTH
        # A compiler makes one kernel of the rotation, and cannot trace its pieces.
        if rotation is not None and (not by_blocks or torch.compiler.is_compiling()):
            queries, keys, rotation = rotate(queries, *rotation), rotate(keys, *rotation), None
            values = values.contiguous()  # as a part of the projection they would keep all of it until backward
        if by_blocks:
            as_it_is = rotation is inputs.rotation and self.query_norm is None
            return causal_attention(qkv if as_it_is else torch.cat((queries, keys, values), dim=3), rotation)
        if mask is not None and not isinstance(mask, Tensor):
            return document_attention(queries, keys, values, mask)
        # Torch's kernels count as random, also without dropout. For a rebuild compiled code keeps the CPU generator's
        # state, and torch 2.13 then checks a main gradient for changes, which are what it is there for.
        rebuilt_by_compiler = self.recompute and torch.compiler.is_compiling() and qkv.device.type == "cpu"
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
        queries, keys, values = qkv.split((self.group_shape[1] - 2, 1, 1), dim=3)
        return queries, keys, values
