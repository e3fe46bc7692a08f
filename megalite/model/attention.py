"""Causal self-attention with grouped queries: one fused projection, rotary positions, attention, output projection.

Tensor-parallel ranks divide the heads, whole groups of them where there are enough; else ranks share a group's key and
value and divide its queries (arXiv 1909.08053, section 3). Attention itself sees the whole sequence and no other rank.

Queries, key and value of a group lie side by side in the fused projection [s, b, groups, q_per_kv + 2, d] and stay in
it until attention itself, so that gradients come back as one tensor.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config.schema import ModelConfig
from megalite.context_parallel.attention import SequenceScores, context_attention
from megalite.context_parallel.exchange import ContextRanks
from megalite.kernels.causal_attention import MAX_LENGTH, causal_attention
from megalite.kernels.dropout import DropoutKey, hash_dropout
from megalite.kernels.rotate import rotate
from megalite.model.norm import RMSNorm
from megalite.model.parameters import GROUPS
from megalite.moe.balance import TokenMasks
from megalite.tensor_parallel.layers import ColumnParallelLinear, Placement, RowParallelLinear

FASTEST_FIRST = [  # on Hopper cuDNN runs at 1.7 to 2.3 times flash, torch's own first choice
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class BlockInputs:
    """What a block needs besides activations. None: no rotation; no mask but the causal one; nothing dropped."""

    rotation: tuple[Tensor, Tensor] | None = None  # of rotary_tables
    mask: Tensor | None = None  # [b, 1, s, s], added to the scores
    probability_dropout: DropoutKey | None = None
    attention_dropout: DropoutKey | None = None
    mlp_dropout: DropoutKey | None = None
    masks: TokenMasks | None = None  # for routers
    scores: SequenceScores | None = None  # where ranks of a ring share each sequence


def attention_backends(device: torch.device) -> AbstractContextManager[None]:
    """Ask for CUDA's attention kernels in order of speed."""
    return sdpa_kernel(FASTEST_FIRST, set_priority=True) if device.type == "cuda" else nullcontext()


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a token may attend (earlier or itself, same document), else -inf: [b, s] -> [b, 1, s, s]."""
    same = documents[:, :, None] == documents[:, None, :]
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~same.tril_(), float("-inf")).unsqueeze(1)


class Attention(nn.Module):
    """Queries of `num_attention_heads`, keys and values of `num_key_value_heads` heads."""

    def __init__(
        self, config: ModelConfig, place: Placement, context: ContextRanks | None = None, *, recompute: bool = False
    ) -> None:
        super().__init__()
        heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_size
        assert groups is not None
        assert d is not None
        assert config.attention_dropout is not None
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
        qkv = self._normed(qkv)
        return qkv if inputs.rotation is None else rotate(qkv, *inputs.rotation)

    def core(self, qkv: Tensor, inputs: BlockInputs) -> Tensor:
        """All between the two projections: [n, b, groups, q_per_kv + 2, d] -> [n, b, heads * d].

        Where ranks share sequences, `project` has normed and rotated, and this is no part of a compiled graph: other
        documents are other tiles.
        """
        if self.context is None:
            return self._whole(self._normed(qkv), inputs.rotation, inputs)
        return context_attention(qkv, self.context, inputs.scores, partial(self._whole, rotation=None, inputs=inputs))

    def _normed(self, qkv: Tensor) -> Tensor:
        if self.query_norm is None or self.key_norm is None:
            return qkv
        queries, keys, values = self._split(qkv)
        return torch.cat((self.query_norm(queries), self.key_norm(keys), values), dim=3)

    def _whole(self, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None, inputs: BlockInputs) -> Tensor:
        """Rotation and attention of whole sequences, in the shapes of `core`."""
        dropped = inputs.probability_dropout
        by_blocks = qkv.device.type == "cpu" and inputs.mask is None and dropped is None and len(qkv) <= MAX_LENGTH
        # A compiler makes one kernel of the rotation, and cannot trace its pieces.
        if rotation is not None and (not by_blocks or torch.compiler.is_compiling()):
            qkv, rotation = rotate(qkv, *rotation), None
        if by_blocks:
            return causal_attention(qkv, rotation)
        # Torch's kernels count as random, also without dropout. For a rebuild compiled code keeps the CPU generator's
        # state, and torch 2.13 then checks a main gradient for changes, which are what it is there for.
        rebuilt_by_compiler = self.recompute and torch.compiler.is_compiling() and qkv.device.type == "cpu"
        if dropped is not None or rebuilt_by_compiler:
            return self._attend_plainly(qkv, inputs.mask, dropped)
        return self._attend(qkv, inputs.mask)

    def _attend(self, qkv: Tensor, mask: Tensor | None) -> Tensor:
        """[s, b, groups, q_per_kv + 2, d] -> [s, b, heads * d] by torch's fused kernels."""
        queries, keys, values = (
            part.flatten(2, 3).permute(1, 2, 0, 3) for part in self._split(qkv)
        )  # [b, heads, s, d]
        out = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend_plainly(self, qkv: Tensor, mask: Tensor | None, dropped: DropoutKey | None) -> Tensor:
        """The same by plain products, which keep the probabilities [b, heads, s, s], with dropout on these: the masks
        that torch's fused kernels draw depend on the layout."""
        s, d = len(qkv), qkv.shape[-1]
        queries, keys, values = (part.permute(1, 2, 3, 0, 4) for part in self._split(qkv))  # [b, groups, heads, s, d]
        if mask is None:
            mask = torch.full((s, s), float("-inf"), dtype=qkv.dtype, device=qkv.device).triu(1)
        else:
            mask = mask.unsqueeze(1)
        scores = (queries * d**-0.5) @ keys.transpose(-1, -2) + mask  # [b, groups, q_per_kv, s, s]
        probabilities = torch.softmax(scores, dim=-1).flatten(1, 2)
        kept = probabilities if dropped is None else hash_dropout(probabilities, self.dropout, dropped)
        return (kept.view(scores.shape) @ values).permute(3, 0, 1, 2, 4).flatten(2)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, groups, q_per_kv, d], keys and values [s, b, groups, 1, d]."""
        queries, keys, values = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
        return queries, keys, values
