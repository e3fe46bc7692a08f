"""LayerNorm and RMSNorm over the last dim; statistics in fp32 (fp64 in fp64) whatever the activations' dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.config.schema import ModelConfig
from megalite.kernels.embed import with_main_grad
from megalite.kernels.products import statistics_dtype
from megalite.tensor_parallel.layers import TpContext


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float, place: TpContext) -> None:
        super().__init__()
        self.weight = place.parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        weight = with_main_grad(self.weight)
        if x.is_cuda or torch.compiler.is_compiling():
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return _CpuRMSNorm.apply(x, weight, self.eps)  # type: ignore[no-any-return]


class _CpuRMSNorm(torch.autograd.Function):
    """F.rms_norm, which on CPUs keeps three wide copies of x for backward, where this keeps x and r.

    With r = 1 / sqrt(mean(x^2) + eps), y = x r w and g = dL/dy: dL/dw = sum of g x r;
    dL/dx = r (g w - x r mean(g w x r)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide: Tensor = x.to(statistics_dtype(x.dtype))
        norms: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale: Tensor = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, wide, wide_weight = (each.to(scale.dtype) for each in (grads[0], x, weight))
        normed = wide * scale
        product = grad * normed
        grad_weight, pull = product.flatten(0, -2).sum(0), (product @ wide_weight).div_(-x.shape[-1])
        grad_x = (grad * wide_weight).addcmul_(normed, pull.unsqueeze(-1)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class LayerNorm(nn.Module):
    """Ba et al. 2016: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    def __init__(self, size: int, eps: float, place: TpContext, *, bias: bool) -> None:
        super().__init__()
        self.weight = place.parameter(size)
        self.bias = place.parameter(size) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        weight = with_main_grad(self.weight)
        bias = None if self.bias is None else with_main_grad(self.bias)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def build_norm(config: ModelConfig, place: TpContext) -> LayerNorm | RMSNorm:
    """The norm of the residual stream that `config` asks for."""
    size, eps = config.hidden_size, config.norm_eps
    if config.norm == "layernorm":
        return LayerNorm(size, eps, place, bias=config.bias)
    return RMSNorm(size, eps, place)
