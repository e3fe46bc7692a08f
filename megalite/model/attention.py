"""Causal self-attention with grouped queries: one fused projection, rotary positions, attention, output projection.

Tensor-parallel ranks divide the heads, whole groups of them where there are enough; else ranks share a group's key and
value and divide its queries (arXiv 1909.08053, section 3). Attention itself sees the whole sequence and no other rank,
unless ranks share sequences (context_parallel).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from megalite.config.schema import LEAST_FLEX_HEAD, ModelConfig
from megalite.context_parallel.attention import context_attention
from megalite.context_parallel.exchange import CpGroups
from megalite.data.batch import Batch
from megalite.kernels.attention import apart, attention, compiled_raise_largest, raise_largest
from megalite.kernels.attention_mask import MAX_ROWS, AttentionMask, DocumentRows, block_mask, dense_mask
from megalite.kernels.dropout import DropoutKey
from megalite.launch.device import FOR_MASKS, KERNELS
from megalite.model.norm import RMSNorm
from megalite.model.parameters import GROUPS
from megalite.model.recompute import Recompute
from megalite.model.rotary import rotate
from megalite.moe.balance import TokenMasks
from megalite.tensor_parallel.collectives import finish, start_all_gather
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TpContext

Heads = tuple[Tensor, Tensor, Tensor]  # queries [s, b, groups, q_per_kv, d], keys [.., 1, d], values [.., 1, e]


@dataclass(frozen=True)
class BlockInputs:
    """What a block needs besides activations. None: no rotation; nothing dropped."""

    rotation: tuple[Tensor, Tensor] | None = None  # of rotary_tables
    mask: AttentionMask = field(default_factory=AttentionMask)
    probability_dropout: DropoutKey | None = None
    attention_dropout: DropoutKey | None = None
    mlp_dropout: DropoutKey | None = None
    tokens: TokenMasks | None = None  # for routers
    logits: tuple[Tensor, Tensor, Tensor | None] | None = None  # for QK-clip, what `note_largest` takes beside heads
    routing: list[Tensor] = field(default_factory=list)  # to which each layer with experts adds a row of metrics


def attention_backends(device: torch.device, mask: AttentionMask) -> AbstractContextManager[None]:
    """Ask for CUDA's attention kernels: for the chosen one, or in order of speed."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(FOR_MASKS if isinstance(mask.form, Tensor) else KERNELS[mask.kernels], set_priority=True)


def attention_mask(batch: Batch, like: Tensor, config: ModelConfig, kernels: str, *, compiled: bool) -> AttentionMask:
    """The mask of a microbatch in the form that is fastest where and how the model runs: causal attention needs none,
    flex attention a table of blocks. `like` has dtype and device of activations."""
    documents = batch.documents
    if batch.plan is not None:
        return AttentionMask(None, kernels, documents, batch.plan)
    dropout, size = config.attention_dropout, config.head_size or 0
    flex = like.is_cuda and compiled and not dropout and size >= LEAST_FLEX_HEAD and like.dtype != torch.float64
    if flex and (documents is not None or kernels == "flex"):
        one = like.new_zeros(len(batch.tokens), batch.length, dtype=torch.int32)
        return AttentionMask(block_mask(one if documents is None else documents), kernels)
    if documents is None:
        return AttentionMask(None, kernels)
    if like.is_cpu and not compiled and not dropout and documents.shape[1] <= MAX_ROWS:
        return AttentionMask(DocumentRows.of(documents), kernels)
    return AttentionMask(dense_mask(documents, like.dtype), kernels)


class Attention(nn.Module):
    """Queries of `num_attention_heads`, keys and values of `num_key_value_heads` heads.

    Another attention has other parameters (`build`), another `project` and other `heads`, which gives `attend` the same
    three tensors. Queries and keys have one size, values may have another.
    """

    def __init__(
        self, config: ModelConfig, place: TpContext, recompute: Recompute, context: CpGroups | None = None
    ) -> None:
        super().__init__()
        self.dropout, self.recompute = config.attention_dropout or 0.0, recompute
        self.device, self.context = place.device, context
        self.build(config, place)

    def build(self, config: ModelConfig, place: TpContext) -> None:
        heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_size
        outputs = groups, heads // groups + 2, d
        self.qkv = ColumnParallelLinear(outputs, config.hidden_size, GROUPS, place, bias=config.bias)
        self.query_norm = RMSNorm(d, config.norm_eps, place) if config.qk_norm else None
        self.key_norm = RMSNorm(d, config.norm_eps, place) if config.qk_norm else None
        self.out = RowParallelLinear(config.hidden_size, heads * d, place, bias=config.bias)

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """[n, b, h] -> [n, b, h], with sequence parallelism [n/t, b, h] -> [n/t, b, h]"""
        core, projected = self.recompute.wrap("attention", partial(self.core, inputs=inputs)), self.project(x)
        if inputs.logits is not None:
            self.note_largest(self.heads(*map(apart, projected), inputs=inputs), *inputs.logits)
        out: Tensor = self.out(core(*projected))
        return out

    def note_largest(self, heads: Heads, largest: Tensor, places: Tensor, documents: Tensor | None) -> None:
        """Raise `largest` [groups] to the logits of a microbatch, whose tokens have `places` [n] and maybe `documents`
        [b, s]. Ranks that share sequences gather all keys."""
        queries, seen = heads[0].detach(), (heads[1].detach(), places)
        for group in () if self.context is None else (self.context.alltoall, self.context.ring):
            if group is not None:
                seen = finish(start_all_gather(seen[0], group)), finish(start_all_gather(seen[1], group))
        note = compiled_raise_largest if torch.compiler.is_compiling() else raise_largest
        note(largest, queries, seen[0], places, seen[1], documents)

    def core(self, *projected: Tensor, inputs: BlockInputs) -> Tensor:
        """Everything between the projections -> [n, b, heads * e]."""
        return self.attend(*self.heads(*projected, inputs=inputs), inputs=inputs)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """What `heads` takes: here [n, b, groups, q_per_kv + 2, d] of x [n, b, h], with sequence parallelism
        [n/t, b, h]."""
        return (self.qkv(x).unflatten(-1, self.qkv.local_outputs),)

    def heads(self, *projected: Tensor, inputs: BlockInputs) -> Heads:
        """Queries, keys and values, normed and rotated."""
        (qkv,) = projected
        queries, keys, values = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if inputs.rotation is not None:
            queries, keys = rotate(queries, *inputs.rotation), rotate(keys, *inputs.rotation)
            values = values.contiguous()  # as a part of the projection they would keep all of it until backward
        return queries, keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, inputs: BlockInputs) -> Tensor:
        """Attention of this rank's heads -> [n, b, heads * e]. Where ranks share sequences, this is no part of a
        compiled graph: other documents are other tiles."""
        if self.context is not None:
            return context_attention(queries, keys, values, self.context, inputs.mask, partial(self.whole, inputs))
        return self.whole(inputs, queries, keys, values)

    def whole(self, inputs: BlockInputs, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of whole sequences."""
        dropped = None if inputs.probability_dropout is None else (self.dropout, inputs.probability_dropout)
        # Torch's kernels count as random, also without dropout. For a rebuild compiled code keeps the CPU generator's
        # state, and torch 2.13 then rejects the intended in-place update of a main gradient.
        plain = "attention" in self.recompute.modules and torch.compiler.is_compiling() and queries.is_cpu
        with attention_backends(self.device, inputs.mask):
            return attention(queries, keys, values, inputs.mask, dropped, plain=plain)
