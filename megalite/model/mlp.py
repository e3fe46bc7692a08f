"""The MLP of a block: up projection, non-linearity, down projection; gated (SwiGLU, Shazeer 2020) or plain.

Tensor-parallel ranks divide the inner width, so that the non-linearity needs no communication (arXiv 1909.08053).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.kernels.swiglu import swiglu
from megalite.layout.parameters import Split
from megalite.model.placement import Placement
from megalite.model.recompute import checkpoint_without_output
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """GELU: down(gelu(up x))."""

    def __init__(self, config: ModelConfig, place: Placement, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute  # backward computes the non-linearity again
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        assert ffn is not None
        self.approximate = {"gelu": "none", "gelu_tanh": "tanh"}[config.activation]
        self.up = ColumnParallelLinear((ffn,), hidden, Split(0), bias=config.bias, **place.of_layers)
        self.down = RowParallelLinear(hidden, ffn, bias=config.bias, **place.of_layers)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        return checkpoint_without_output(self._activate, self.down, self.up(x), recompute=self.recompute)

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
        return checkpoint_without_output(self._activate, self.down, self.gate_up(x), recompute=self.recompute)

    def _activate(self, x: Tensor) -> Tensor:
        return swiglu(x)


def build_mlp(config: ModelConfig, place: Placement, *, recompute: bool = False) -> MLP | GatedMLP:
    """The MLP that `config` asks for."""
    return (GatedMLP if config.activation == "swiglu" else MLP)(config, place, recompute=recompute)
