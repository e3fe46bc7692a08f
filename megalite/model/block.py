"""One transformer block, pre-norm: x + attention(norm(x)), then x + mlp(norm(x)) or, with experts, x + moe(norm(x)).

A function of its inputs and parameters (routers also add a row to `BlockInputs.routing`), so that backward can
recompute it. `compile_parts` says what of it is compiled: the rows of an expert are only known when they run.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.activations import ACTIVATIONS
from megalite.config.schema import ModelConfig
from megalite.context_parallel.exchange import CpGroups
from megalite.kernels.dropout import DropoutKey, hash_dropout
from megalite.kernels.products import statistics_dtype
from megalite.layout.parameters import Split
from megalite.model.attention import Attention, BlockInputs, Heads
from megalite.model.norm import build_norm
from megalite.model.parameters import inner_projection, shared_width
from megalite.model.recompute import Recompute
from megalite.moe.dispatch import ExpertRanks
from megalite.moe.experts import Experts
from megalite.moe.layer import MoELayer
from megalite.moe.router import Router
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TpContext
from megalite.tensor_parallel.linear import activated


class Block(nn.Module):
    """The residual stream stays in the compute dtype. `recompute`: what backward computes again, of "attention",
    "norm", "activation" and "moe". `experts`: the ranks that together hold one set of them, which replaces the MLP."""

    def __init__(
        self,
        config: ModelConfig,
        place: TpContext,
        recompute: Collection[str] = (),
        context: CpGroups | None = None,
        experts: ExpertRanks | None = None,
    ) -> None:
        super().__init__()
        self.recompute, self.dropout = Recompute(recompute), config.dropout
        self.attention_norm = self.recompute.norm(build_norm(config, place))
        self.attention = Attention(config, place, self.recompute, context)
        self.mlp_norm = self.recompute.norm(build_norm(config, place))
        self.moe: MoELayer | None = None
        self.shared: MLP | None = None
        if experts is None:
            self.mlp = MLP(config, place, self.recompute)
            return
        inner, activation = inner_projection(config, config.moe.ffn_hidden_size), ACTIVATIONS[config.activation]
        again = "moe" in recompute
        local = Experts(config.moe, config.hidden_size, inner, activation, experts, place, recompute=again)
        router = Router(config.moe, config.hidden_size, statistics_dtype(place.dtype), place.device)
        self.moe = MoELayer(router, local, experts)
        if width := shared_width(config):  # all shared experts are one MLP beside the others
            place = replace(place, fp8=None)  # fp8 pays in compiled code alone
            self.shared = MLP(config, place, self.recompute, ffn=width)

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        return self.feed_forward(self.attend(x, inputs), inputs)

    def attend(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """x + attention(norm(x))"""
        with self.recompute.outputs_dropped():
            return x + self._drop(self.attention(self.attention_norm(x), inputs), inputs.attention_dropout)

    def feed_forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """x + mlp(norm(x))"""
        with self.recompute.outputs_dropped():
            return x + self._drop(self._mlp(self.mlp_norm(x), inputs), inputs.mlp_dropout)

    def _mlp(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        if self.moe is None:
            return self.mlp(x)  # type: ignore[no-any-return]
        y: Tensor
        y, metrics = self.moe(x, inputs.tokens, self.shared)
        inputs.routing.append(metrics)
        return y

    def _drop(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        return x if key is None else hash_dropout(x, self.dropout, key)

    def compile_parts(self, options: dict[str, Any] | None) -> None:
        """Compile what can be one graph: the block or, with experts, its attention and, on CUDA, what is between their
        products. Where ranks share sequences, the graphs are what is before attention, what is behind it and, where
        they exchange heads, attention of whole sequences."""
        compiled = partial(torch.compile, fullgraph=True, dynamic=False, options=options)
        attention = self.attention
        if self.moe is not None:
            self.moe.experts.compiled = self.moe.router.compiled = attention.device.type == "cuda"
        if attention.context is None:
            part = "forward" if self.moe is None else "attend"
            setattr(self, part, compiled(getattr(self, part)))
            return

        @compiled
        def before(x: Tensor, inputs: BlockInputs) -> Heads:
            return attention.heads(*attention.project(self.attention_norm(x)), inputs=inputs)

        @compiled
        def behind(x: Tensor, attended: Tensor, inputs: BlockInputs) -> Tensor:
            x = x + self._drop(attention.out(attended), inputs.attention_dropout)
            return x if self.moe is not None else self.feed_forward(x, inputs)

        def forward(x: Tensor, inputs: BlockInputs) -> Tensor:
            core = self.recompute.wrap("attention", partial(attention.attend, inputs=inputs))
            heads = before(x, inputs)
            if inputs.logits is not None:
                attention.note_largest(heads, *inputs.logits)
            with self.recompute.outputs_dropped():
                x = behind(x, core(*heads), inputs)
            return x if self.moe is None else self.feed_forward(x, inputs)

        setattr(attention, "whole", compiled(attention.whole))  # noqa: B010
        setattr(self, "forward", forward)  # noqa: B010


class MLP(nn.Module):
    """down(activation(up x)); gated, gate and up are one product. Tensor-parallel ranks divide the inner width, so that
    the non-linearity needs no communication (arXiv 1909.08053)."""

    def __init__(self, config: ModelConfig, place: TpContext, recompute: Recompute, *, ffn: int | None = None) -> None:
        """`ffn`: the inner width, by default the model's."""
        super().__init__()
        activation = recompute.wrap("activation", ACTIVATIONS[config.activation])
        # Without a bias there is nothing to sum, and another shape would hide a product from the collective beside it.
        self.activation = partial(activated, activation) if config.bias else activation
        self.inner, outputs = inner_projection(config, ffn)  # its name: `up` or `gate_up`
        columns = Split(len(outputs) - 1)
        inner = ColumnParallelLinear(
            outputs, config.hidden_size, columns, place, bias=config.bias, before_activation=True
        )
        self.add_module(self.inner, inner)
        self.down = RowParallelLinear(config.hidden_size, outputs[-1], place, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        out: Tensor = self.down(self.activation(getattr(self, self.inner)(x)))
        return out
