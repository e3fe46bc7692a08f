"""A linear layer whose weight keeps its logical shape: every dim but the last is an output dim."""

import torch
from torch import Tensor, nn

from megalite.model.linear import linear


class Projection(nn.Module):
    """weight [*outputs, inputs], bias [*outputs]; the product is over the flattened outputs."""

    def __init__(
        self, outputs: tuple[int, ...], inputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(*outputs, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., prod(outputs)]"""
        return linear(x, self.weight.flatten(0, -2), None if self.bias is None else self.bias.flatten())
