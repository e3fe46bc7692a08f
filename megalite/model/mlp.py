"""The MLP of a block: up projection, non-linearity, down projection; gated (SwiGLU, Shazeer 2020) or plain."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.model.projection import Projection


class MLP(nn.Module):
    """GELU: down(gelu(up x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        assert ffn is not None
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.up = Projection((ffn,), hidden, bias=config.bias, dtype=dtype, device=device)
        self.down = Projection((hidden,), ffn, bias=config.bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]"""
        return self.down(F.gelu(self.up(x), approximate=self.approximate))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x); gate and up are one product."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        assert ffn is not None
        self.gate_up = Projection((2, ffn), hidden, bias=config.bias, dtype=dtype, device=device)
        self.down = Projection((hidden,), ffn, bias=config.bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def build_mlp(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> MLP | GatedMLP:
    """The MLP that `config` asks for."""
    return (GatedMLP if config.activation == "swiglu" else MLP)(config, dtype, device)
