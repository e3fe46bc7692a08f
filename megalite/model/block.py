"""One transformer block, pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).

A pure function of its inputs, parameters and the random generator, so that it compiles whole (`fullgraph`) and can be
recomputed in backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.model.attention import Attention, AttentionInputs
from megalite.model.mlp import build_mlp
from megalite.model.norm import build_norm


class Block(nn.Module):
    """The residual stream stays in the compute dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, dtype, device)
        self.attention = Attention(config, dtype, device)
        self.mlp_norm = build_norm(config, dtype, device)
        self.mlp = build_mlp(config, dtype, device)
        self.dropout = config.dropout

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """[s, b, h] -> [s, b, h]"""
        x = x + self._drop(self.attention(self.attention_norm(x), inputs))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout > 0 else x
