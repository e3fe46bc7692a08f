"""One transformer block, pre-norm: x + attention(norm(x)), then x + mlp(norm(x)) or, with experts, x + moe(norm(x)).

A pure function of its inputs and parameters, so that it can be recomputed in backward and compiles (`fullgraph`): all
of it, or with experts its attention, since how many rows they have is only known when they run.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.context_parallel.exchange import ContextRanks
from megalite.kernels.dropout import DropoutKey, hash_dropout
from megalite.kernels.pieces import statistics_dtype
from megalite.model.attention import Attention, BlockInputs, attention_backends
from megalite.model.mlp import ACTIVATIONS, MLP
from megalite.model.norm import build_norm
from megalite.model.parameters import expert_width, inner_projection, shared_width
from megalite.model.recompute import checkpoint_without_output
from megalite.moe.dispatch import ExpertRanks
from megalite.moe.layer import Experts, MoELayer
from megalite.moe.router import Router
from megalite.tensor_parallel.layers import Placement


class AttentionBlock(nn.Module):
    """The first half. The residual stream stays in the compute dtype. `recompute`: what backward computes again, of
    "attention", "norm", "activation" and "moe"."""

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        recompute: Collection[str] = (),
        context: ContextRanks | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, place)
        self.attention = Attention(config, place, context, recompute="attention" in recompute)
        self.mlp_norm = build_norm(config, place)
        self.dropout = config.dropout
        self.recompute_norms = "norm" in recompute

    def attend(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """x, and what attention adds to it."""
        attention = self.attention
        core, leave = partial(attention.core, inputs=inputs), partial(self.leave, x=x, inputs=inputs)
        backends, recompute = partial(attention_backends, attention.device, inputs), attention.recompute
        return checkpoint_without_output(core, leave, self.enter(x, inputs), recompute=recompute, around=backends)

    def enter(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """What attention's core takes."""
        project = partial(self.attention.project, inputs=inputs)
        return checkpoint_without_output(self.attention_norm, project, x, recompute=self.recompute_norms)

    def leave(self, attended: Tensor, x: Tensor, inputs: BlockInputs) -> Tensor:
        """x, and what follows from the core's output."""
        return x + self._drop(self.attention.out(attended), inputs.attention_dropout)

    def compile_parts(self, options: dict[str, Any] | None) -> None:
        """Compile what can be one graph: where ranks share sequences, what is before attention's core, what is behind
        it and, where they exchange heads, attention."""
        parts: list[tuple[Any, str]] = [(self, "attend")]
        if self.attention.context is not None:
            parts = [(self, "enter"), (self, "leave"), (self.attention, "whole_projection")]
        for module, part in parts:
            compiled = torch.compile(getattr(module, part), fullgraph=True, dynamic=False, options=options)
            setattr(module, part, compiled)

    def _drop(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        return x if key is None else hash_dropout(x, self.dropout, key)


class Block(AttentionBlock):
    """A block with an MLP."""

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        recompute: Collection[str] = (),
        context: ContextRanks | None = None,
    ) -> None:
        super().__init__(config, place, recompute, context)
        self.mlp = MLP(config, place, recompute="activation" in recompute)

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        return self.attend(x, inputs)

    def leave(self, attended: Tensor, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The whole rest of the block."""
        x = super().leave(attended, x, inputs)
        y = checkpoint_without_output(self.mlp_norm, self.mlp, x, recompute=self.recompute_norms)
        return x + self._drop(y, inputs.mlp_dropout)


class MoEBlock(AttentionBlock):
    """A block with experts, of which `ranks` hold one set together; shared experts are an MLP beside them."""

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        ranks: ExpertRanks,
        recompute: Collection[str] = (),
        context: ContextRanks | None = None,
    ) -> None:
        super().__init__(config, place, recompute, context)
        experts = Experts(
            config.moe,
            config.hidden_size,
            inner_projection(config, expert_width(config)),
            ACTIVATIONS[config.activation],
            ranks,
            dtype=place.dtype,
            device=place.device,
            deferred=place.deferred,
            recompute="moe" in recompute,
        )
        router = Router(config.moe, config.hidden_size, statistics_dtype(place.dtype), place.device)
        self.moe = MoELayer(router, experts, ranks)
        self.shared: MLP | None = None
        if width := shared_width(config):
            wide = replace(place, fp8=None)  # fp8 pays in compiled code alone
            self.shared = MLP(config, wide, ffn=width, recompute="activation" in recompute)

    def forward(self, x: Tensor, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]; and the router's figures."""
        x = self.attend(x, inputs)
        consumer = partial(self._experts, inputs=inputs)
        y, figures = checkpoint_without_output(self.mlp_norm, consumer, x, recompute=self.recompute_norms)
        return x + self._drop(y, inputs.mlp_dropout), figures

    def _experts(self, x: Tensor, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        assert inputs.masks is not None
        y, figures = self.moe(x, inputs.masks, self.shared)
        return y, figures
