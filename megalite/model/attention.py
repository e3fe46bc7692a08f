"""Causal self-attention with grouped queries: one fused projection, rotary positions, attention, output projection.

Tensor-parallel ranks divide the heads, whole groups of them where there are enough; else ranks share a group's key and
value and divide its queries (arXiv 1909.08053, section 3). Attention itself sees the whole sequence and no other rank.

Queries, key and value of a group lie side by side in the fused projection [s, b, groups, q_per_kv + 2, d] and stay in
it until attention itself, so that gradients come back as one tensor and, with as many key heads as query heads, no
layout is copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config.schema import ModelConfig
from megalite.model.causal_attention import MAX_LENGTH, causal_attention
from megalite.model.norm import RMSNorm
from megalite.model.parameters import GROUPS
from megalite.model.placement import Placement
from megalite.model.rotary import rotate
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.recompute import chain

FASTEST_FIRST = [  # on Hopper cuDNN runs at 1.7 to 2.3 times flash, torch's own first choice
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class AttentionInputs:
    """What all layers share in one microbatch. None: no rotary positions; no mask but the causal one."""

    rotation: tuple[Tensor, Tensor] | None  # of rotary_tables
    mask: Tensor | None  # [b, 1, s, s], added to the scores


@contextmanager
def attention_backends(device: torch.device, dropout: float) -> Iterator[None]:
    """Ask for CUDA's attention kernels in order of speed."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(fastest_first(dropout), set_priority=True):
        yield


def fastest_first(dropout: float) -> list[SDPBackend]:
    """Some of cuDNN's kernels round the probability of dropout to sixteenths; torch 2.11 lets them, later ones refuse
    (https://github.com/pytorch/pytorch/pull/174245)."""
    return FASTEST_FIRST if (16 * dropout).is_integer() else FASTEST_FIRST[1:]


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a token may attend (earlier or itself, same document), else -inf: [b, s] -> [b, 1, s, s]."""
    same = documents[:, :, None] == documents[:, None, :]
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~same.tril_(), float("-inf")).unsqueeze(1)


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
        self.qkv = ColumnParallelLinear(
            (groups, heads // groups + 2, d), config.hidden_size, GROUPS, bias=config.bias, **place.of_layers
        )
        self.group_shape = self.qkv.local_outputs
        self.query_norm = RMSNorm(d, config.norm_eps, place.dtype, place.device) if config.qk_norm else None
        self.key_norm = RMSNorm(d, config.norm_eps, place.dtype, place.device) if config.qk_norm else None
        self.out = RowParallelLinear(config.hidden_size, heads * d, bias=config.bias, **place.of_layers)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        qkv = self.qkv(x).unflatten(-1, self.group_shape)  # [s, b, groups, q_per_kv + 2, d]
        dropout = self.dropout if self.training else 0.0
        core = partial(self._core, inputs=inputs, dropout=dropout)
        backends = partial(attention_backends, self.device, dropout)
        return chain(core, self.out, qkv, rebuild=self.recompute, random=dropout > 0, around=backends)

    def _core(self, qkv: Tensor, inputs: AttentionInputs, dropout: float) -> Tensor:
        """[s, b, groups, q_per_kv + 2, d] -> [s, b, heads * d]: norms, rotation and attention."""
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys, values = self._split(qkv)
            qkv = torch.cat((self.query_norm(queries), self.key_norm(keys), values), dim=3)
        rotation = inputs.rotation
        by_blocks = qkv.device.type == "cpu" and inputs.mask is None and dropout == 0.0 and len(qkv) <= MAX_LENGTH
        # A compiler makes one kernel of the rotation, and cannot trace its pieces.
        if rotation is not None and (not by_blocks or torch.compiler.is_compiling()):
            qkv, rotation = rotate(qkv, *rotation), None
        if by_blocks:
            return causal_attention(qkv, rotation)
        return self._attend(qkv, inputs.mask, dropout)

    def _attend(self, qkv: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """[s, b, groups, q_per_kv + 2, d] -> [s, b, heads * d] by torch's fused kernels."""
        queries, keys, values = (
            part.flatten(2, 3).permute(1, 2, 0, 3) for part in self._split(qkv)
        )  # [b, heads, s, d]
        out = F.scaled_dot_product_attention(
            queries, keys, values, mask, dropout, is_causal=mask is None, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, groups, q_per_kv, d], keys and values [s, b, groups, 1, d]."""
        queries, keys, values = qkv.split((self.group_shape[1] - 2, 1, 1), dim=3)
        return queries, keys, values
