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

    def __init__(
        self, config: ModelConfig, place: Placement, *, ffn: int | None = None, recompute: bool = False
    ) -> None:
        """`ffn`: the inner width, by default the model's."""
        super().__init__()
        self.recompute = recompute  # backward computes the non-linearity again
        hidden = config.hidden_size
        self.activation = ACTIVATIONS[config.activation]
        self.inner, outputs = inner_projection(config, ffn)  # its name: `up` or `gate_up`
        columns = Split(len(outputs) - 1)
        inner = ColumnParallelLinear(outputs, hidden, columns, place, bias=config.bias, before_activation=True)
        self.add_module(self.inner, inner)
        self.down = RowParallelLinear(hidden, outputs[-1], place, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        inner = getattr(self, self.inner)(x)
        out: Tensor = checkpoint_without_output(self.activation, self.down, inner, recompute=self.recompute)
        return out
