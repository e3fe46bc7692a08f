"""LayerNorm and RMSNorm over the last dim; statistics in fp32 (fp64 in fp64) whatever the activations' dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.kernels.rms_norm import rms_norm


class LayerNorm(nn.Module):
    """Ba, Kiros and Hinton 2016, with an optional bias."""

    def __init__(self, size: int, eps: float, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return rms_norm(x, self.weight, self.eps)


def build_norm(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LayerNorm | RMSNorm:
    """The norm of the residual stream that `config` asks for."""
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, config.norm_eps, config.bias, dtype, device)
    return RMSNorm(config.hidden_size, config.norm_eps, dtype, device)
