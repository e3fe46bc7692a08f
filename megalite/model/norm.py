"""LayerNorm and RMSNorm over the last dim; statistics in fp32 (fp64 in fp64) whatever the activations' dtype."""

from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.kernels.rms_norm import rms_norm
from megalite.tensor_parallel.layers import Placement


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.weight = place.parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return rms_norm(x, self.weight, self.eps)


def build_norm(config: ModelConfig, place: Placement) -> nn.LayerNorm | RMSNorm:
    """The norm of the residual stream that `config` asks for."""
    size, eps = config.hidden_size, config.norm_eps
    if config.norm == "layernorm":
        return nn.LayerNorm(size, eps, bias=config.bias, dtype=place.dtype, device=place.device)
    return RMSNorm(size, eps, place)
