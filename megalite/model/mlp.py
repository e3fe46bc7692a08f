"""The MLP of a block: up projection, non-linearity, down projection.

Tensor-parallel ranks divide the inner width, so that the non-linearity needs no communication (arXiv 1909.08053). The
non-linearities are rows of config/activations.py.
"""

from torch import Tensor, nn

from megalite.config.activations import ACTIVATIONS
from megalite.config.schema import ModelConfig
from megalite.layout.parameters import Split
from megalite.model.parameters import inner_projection
from megalite.model.recompute import Recompute
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TpContext


class MLP(nn.Module):
    """down(activation(up x)); gated, gate and up are one product."""

    def __init__(
        self, config: ModelConfig, place: TpContext, *, ffn: int | None = None, recompute: Recompute | None = None
    ) -> None:
        """`ffn`: the inner width, by default the model's."""
        super().__init__()
        activation = ACTIVATIONS[config.activation]
        self.activation = activation if recompute is None else recompute.wrap("activation", activation)
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
