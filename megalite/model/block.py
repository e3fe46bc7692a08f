"""One transformer block, pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).

A pure function of its inputs and parameters, so that it compiles whole (`fullgraph`) and can be
recomputed in backward.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.kernels.dropout import DropoutKey, hash_dropout
from megalite.model.attention import Attention, AttentionInputs
from megalite.model.mlp import MLP
from megalite.model.norm import build_norm
from megalite.model.recompute import checkpoint_without_output
from megalite.tensor_parallel.layers import Placement


@dataclass(frozen=True)
class BlockInputs:
    """What a block needs besides activations. The keys of dropout are None where nothing is dropped."""

    attention: AttentionInputs
    probability_dropout: DropoutKey | None = None
    attention_dropout: DropoutKey | None = None
    mlp_dropout: DropoutKey | None = None


class Block(nn.Module):
    """The residual stream stays in the compute dtype. `recompute`: what backward computes again, of "attention", "norm"
    and "activation"."""

    def __init__(self, config: ModelConfig, place: Placement, recompute: Collection[str] = ()) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, place)
        self.attention = Attention(config, place, recompute="attention" in recompute)
        self.mlp_norm = build_norm(config, place)
        self.mlp = MLP(config, place, recompute="activation" in recompute)
        self.dropout = config.dropout
        self.recompute_norms = "norm" in recompute

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """[s, b, h] -> [s, b, h], with sequence parallelism [s/t, b, h] -> [s/t, b, h]"""
        attention = partial(self.attention, inputs=inputs.attention, dropped=inputs.probability_dropout)
        y = checkpoint_without_output(self.attention_norm, attention, x, recompute=self.recompute_norms)
        x = x + self._drop(y, inputs.attention_dropout)
        y = checkpoint_without_output(self.mlp_norm, self.mlp, x, recompute=self.recompute_norms)
        return x + self._drop(y, inputs.mlp_dropout)

    def _drop(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        return x if key is None else hash_dropout(x, self.dropout, key)
