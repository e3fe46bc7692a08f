"""The MLP of a block: up projection, non-linearity, down projection.

Tensor-parallel ranks divide the inner width, so that the non-linearity needs no communication (arXiv 1909.08053). A new
plain activation is one line of ACTIVATIONS and a choice of `model.activation`; a gated one joins `ModelConfig.gated`.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.kernels.swiglu import swiglu
from megalite.layout.parameters import Split
from megalite.model.parameters import inner_projection
from megalite.model.recompute import checkpoint_without_output
from megalite.tensor_parallel.layers import ColumnParallelLinear, Placement, RowParallelLinear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": swiglu,  # gated: of gate and up side by side
}


class MLP(nn.Module):
    """down(activation(up x)); gated, gate and up are one product."""

    def __init__(self, config: ModelConfig, place: Placement, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute  # backward computes the non-linearity again
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        assert ffn is not None
        self.activation = ACTIVATIONS[config.activation]
        self.inner, outputs = inner_projection(config)  # its name: `up` or `gate_up`
        columns = Split(len(outputs) - 1)
        self.add_module(self.inner, ColumnParallelLinear(outputs, hidden, columns, place, bias=config.bias))
        self.down = RowParallelLinear(hidden, ffn, place, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        inner = getattr(self, self.inner)(x)
        return checkpoint_without_output(self._activate, self.down, inner, recompute=self.recompute)

    def _activate(self, x: Tensor) -> Tensor:
        return self.activation(x)
