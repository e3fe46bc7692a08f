"""The MLP of a block: up projection, non-linearity, down projection; gated (SwiGLU, Shazeer 2020) or plain.

Tensor-parallel ranks divide the inner width, so that the non-linearity needs no communication (arXiv 1909.08053).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.config.schema import ModelConfig
from megalite.model.placement import Placement
from megalite.parallel.parameters import Split
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.recompute import chain


class MLP(nn.Module):
    """GELU: down(gelu(up x))."""

    def __init__(self, config: ModelConfig, place: Placement, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute  # backward computes the non-linearity again
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        assert ffn is not None
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.up = ColumnParallelLinear((ffn,), hidden, Split(0), bias=config.bias, **place.of_layers)
        self.down = RowParallelLinear(hidden, ffn, bias=config.bias, **place.of_layers)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        return chain(self._activate, self.down, self.up(x), rebuild=self.recompute)

    def _activate(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x); gate and up are one product."""

    def __init__(self, config: ModelConfig, place: Placement, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute  # backward computes the non-linearity again
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        assert ffn is not None
        self.gate_up = ColumnParallelLinear((2, ffn), hidden, Split(1), bias=config.bias, **place.of_layers)
        self.down = RowParallelLinear(hidden, ffn, bias=config.bias, **place.of_layers)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        return chain(self._activate, self.down, self.gate_up(x), rebuild=self.recompute)

    def _activate(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a compiler makes one kernel of the chain
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        return _SwiGLU.apply(x)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., 2 * ffn]; backward writes both gradients where they belong instead of joining them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grads[0], activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad_gate_up


def build_mlp(config: ModelConfig, place: Placement, *, recompute: bool = False) -> MLP | GatedMLP:
    """The MLP that `config` asks for."""
    return (GatedMLP if config.activation == "swiglu" else MLP)(config, place, recompute=recompute)
