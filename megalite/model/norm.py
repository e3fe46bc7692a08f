"""LayerNorm and RMSNorm over the last dim; statistics in fp32 (fp64 in fp64) whatever the activations' dtype."""

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.kernels.embed import with_main_grad
from megalite.kernels.rms_norm import rms_norm
from megalite.tensor_parallel.layers import TpContext


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float, place: TpContext) -> None:
        super().__init__()
        self.weight = place.parameter(size)
        self.eps = eps
        self.small_main_grads: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return rms_norm(x, with_main_grad(self.weight, self.small_main_grads.get("weight")), self.eps)


class LayerNorm(nn.Module):
    """Ba et al. 2016: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    def __init__(self, size: int, eps: float, place: TpContext, *, bias: bool) -> None:
        super().__init__()
        self.weight = place.parameter(size)
        self.bias = place.parameter(size) if bias else None
        self.eps = eps
        self.small_main_grads: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        weight = with_main_grad(self.weight, self.small_main_grads.get("weight"))
        bias = None if self.bias is None else with_main_grad(self.bias, self.small_main_grads.get("bias"))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def build_norm(config: ModelConfig, place: TpContext) -> LayerNorm | RMSNorm:
    """The norm of the residual stream that `config` asks for."""
    size, eps = config.hidden_size, config.norm_eps
    if config.norm == "layernorm":
        return LayerNorm(size, eps, place, bias=config.bias)
    return RMSNorm(size, eps, place)
