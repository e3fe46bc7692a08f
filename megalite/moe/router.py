"""Which experts each token goes to, and with what weight. All of it in the precision of the masters.

Scores, groups and biases are Megatron-core's (transformer/moe/router.py). A token's experts are the `top_k` largest of
its scores; with groups, of the groups with the largest sums of `top_k / top_k_groups` scores; with expert biases, of
the scores plus these, which no weight contains (loss-free balancing, arXiv 2408.15664). Sigmoids are divided by their
sum as the softmax of their logarithms: however far below zero the logits are, the sum is 1 and has its gradient.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import MoEConfig
from megalite.kernels.products import wide_product


class Choice(NamedTuple):
    """The experts of t tokens."""

    experts: Tensor  # [t, k], int64; where it is the number of experts, nobody computes
    weights: Tensor  # [t, k]


class Router(nn.Module):
    """Holds the matrix of the logits and, beside the parameters, what balances without a gradient: `expert_bias` [E],
    and `share` [E], how much of the step before each expert had, as its loss counts. Training sets both."""

    expert_bias: Tensor
    share: Tensor

    def __init__(self, config: MoEConfig, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.moe, self.compiled = config, False
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, dtype=dtype, device=device))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=dtype, device=device))
        self.register_buffer("share", torch.full_like(self.expert_bias, 1 / config.num_experts))

    def logits(self, x: Tensor) -> Tensor:
        """[t, h] -> [t, E]"""
        return wide_product(x, self.weight, by_terms=self.compiled)

    def choose(self, logits: Tensor) -> Choice:
        """The experts of each token and their weights, both the largest score first."""
        moe, k = self.moe, self.moe.top_k
        divide = moe.normalize_weights and k > 1
        if moe.score == "sigmoid":
            experts = top_experts(self._ranked(logits), k, moe.num_groups, moe.top_k_groups)
            logs = F.logsigmoid(logits.gather(1, experts))
            weights = logs.softmax(1) if divide else logs.exp()
            return Choice(experts, weights * moe.scaling_factor)
        scores = logits.softmax(1) if moe.pre_softmax else logits
        experts = top_experts(scores.detach(), k, moe.num_groups, moe.top_k_groups)
        weights = scores.gather(1, experts)
        if not moe.pre_softmax:
            weights = weights.softmax(1)
        elif divide:  # the sum is at least 1 / E: the best expert's group, or a better one, is among the chosen
            weights = weights / weights.sum(-1, keepdim=True)
        return Choice(experts, weights * moe.scaling_factor)

    @torch.no_grad()
    def _ranked(self, logits: Tensor) -> Tensor:
        """Numbers [t, E] in the order of the sigmoids plus the biases.

        Sigmoids far from zero are all 0 or all 1. Where no bias was learned, numbers of the same order are taken: the
        logits, or with groups, whose sums count, the probabilities.
        """
        plain = logits if self.moe.num_groups == 1 else self.probabilities(logits)
        return torch.where(self.expert_bias.any(), logits.sigmoid() + self.expert_bias, plain)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What balancing losses take for the router's distribution: [t, E], the sum over the experts is 1."""
        return (logits if self.moe.score == "softmax" else F.logsigmoid(logits)).softmax(1)


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """How many choose each expert [E], int64, those of nobody left out. torch.bincount would wait for the device."""
    flat = experts.flatten()
    return flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def top_experts(scores: Tensor, k: int, groups: int = 1, top_groups: int = 1) -> Tensor:
    """[t, E] -> [t, k], the experts with the largest scores, in the groups with the largest sums of their best."""
    if groups > 1:
        grouped = scores.unflatten(1, (groups, -1))  # [t, groups, E / groups]
        of_group = grouped.topk(k // top_groups, dim=2).values.sum(2)
        chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(
            1, of_group.topk(top_groups, dim=1).indices, True
        )
        scores = grouped.masked_fill(~chosen.unsqueeze(2), float("-inf")).flatten(1)
    return scores.topk(k, dim=1).indices
