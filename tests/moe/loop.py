"""A mixture of experts as a loop over tokens and experts, and small layers to hold against it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.activations import ACTIVATIONS
from megalite.config.schema import MoEConfig
from megalite.data.batch import whole_batch
from megalite.moe.balance import TokenMasks
from megalite.moe.dispatch import ExpertRanks
from megalite.moe.experts import Experts
from megalite.moe.layer import MoELayer
from megalite.moe.router import Router
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.layers import TpContext

HIDDEN, WIDTH, SEQUENCE, BATCH = 6, 8, 8, 3
SCALE = 0.37  # of the loss


@dataclass(frozen=True)
class Problem:
    """What a layer is given: x [s, b, h], what counts [b, s], the gradient of y, and all values of the layer."""

    moe: MoEConfig
    activation: str
    x: Tensor
    mask: Tensor
    y_grad: Tensor
    router: Tensor  # [E, h]
    inner: Tensor  # [E, 2, F, h] or [E, F, h]
    down: Tensor  # [E, h, F]
    bias: Tensor
    share: Tensor

    @classmethod
    def drawn(cls, settings: dict[str, Any], activation: str = "swiglu", *, seed: int = 0) -> "Problem":
        """Weights depend on `settings` alone, x and mask also on `seed`. The second sequence is padding."""
        moe = MoEConfig(ffn_hidden_size=WIDTH, **{"num_experts": 8, **settings})
        experts = moe.num_experts
        weights, data = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)

        def normal(generator: torch.Generator, *shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        mask = torch.rand(BATCH, SEQUENCE, generator=data) > 0.25
        mask[1] = False
        share = torch.rand(experts, generator=weights, dtype=torch.float64)
        return cls(
            *(moe, activation, normal(data, SEQUENCE, BATCH, HIDDEN), mask, normal(data, SEQUENCE, BATCH, HIDDEN)),
            router=normal(weights, experts, HIDDEN),
            inner=normal(weights, experts, *([2] if activation == "swiglu" else []), WIDTH, HIDDEN),
            down=normal(weights, experts, HIDDEN, WIDTH),
            bias=0.3 * normal(weights, experts) if moe.expert_bias_rate else torch.zeros(experts).double(),
            share=share / share.sum(),
        )


@dataclass(frozen=True)
class Solution:
    """What a layer makes of a problem. `figures`: tokens that chose each expert, those that the global balancing loss
    counts for each, dropped choices, both losses and the entropy (each the sum over the tokens that count), and these
    tokens."""

    y: Tensor
    figures: Tensor
    x_grad: Tensor
    router_grad: Tensor
    inner_grad: Tensor
    down_grad: Tensor


def solve(problem: Problem) -> Solution:
    """By the loop. With an aux loss and a z-loss the whole loss is (y * y_grad).sum() + SCALE * their sum."""
    x, router, inner, down = leaves = [
        value.clone().requires_grad_() for value in (problem.x, problem.router, problem.inner, problem.down)
    ]
    moe, mask = problem.moe, problem.mask
    routed = {(s, b) for s in range(SEQUENCE) for b in range(BATCH) if mask[b].any()}  # of padding nothing counts
    logits = {at: router @ x[at] for at in routed}
    chosen = {at: _chosen(logits[at], problem) for at in routed}
    counts = [sum(expert in its for its in chosen.values()) for expert in range(moe.num_experts)]
    kept = {(at, expert) for at, its in chosen.items() for expert in its}
    if moe.capacity_factor is not None:
        kept = _within_capacity(chosen, round(moe.capacity_factor * len(routed) * moe.top_k, 6) / moe.num_experts)
    y = 0 * x
    for s, b in routed:
        of_token = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in chosen[s, b].items():
            if ((s, b), expert) in kept:
                of_token = of_token + weight * _expert(x[s, b], inner[expert], down[expert], problem.activation)
        y[s, b] = of_token
    scored = {(s, b): one for (s, b), one in logits.items() if mask[b, s]}
    balance, z, entropy, balanced = _losses(scored, problem)
    ((y * problem.y_grad).sum() + SCALE * (balance + z)).backward()
    dropped = sum(counts) - len(kept)
    row = [*counts, *balanced, dropped, balance.item(), z.item(), entropy, len(scored)]
    return Solution(y.detach(), torch.tensor(row, dtype=torch.float64), *map(_gradient, leaves))


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _chosen(logits: Tensor, problem: Problem) -> dict[int, Tensor]:
    """The weight of each chosen expert of one token."""
    moe, experts = problem.moe, range(problem.moe.num_experts)
    scores = {"sigmoid": logits.sigmoid(), "softmax": logits.softmax(0) if moe.pre_softmax else logits}[moe.score]
    ranked = (scores.detach() + problem.bias).tolist()
    if moe.num_groups > 1:
        size = moe.num_experts // moe.num_groups
        groups = [ranked[group * size : (group + 1) * size] for group in range(moe.num_groups)]
        best = [sum(sorted(group)[-(moe.top_k // moe.top_k_groups) :]) for group in groups]
        allowed = sorted(range(moe.num_groups), key=lambda group: best[group])[-moe.top_k_groups :]
        experts = [expert for expert in experts if expert // size in allowed]
    its = sorted(experts, key=lambda expert: ranked[expert])[-moe.top_k :]
    weights = {expert: scores[expert] for expert in its}
    if moe.score == "softmax" and not moe.pre_softmax:
        total = sum(weight.exp() for weight in weights.values())
        weights = {expert: weight.exp() / total for expert, weight in weights.items()}
    elif moe.normalize_weights and moe.top_k > 1:
        total = sum(weights.values())
        weights = {expert: weight / total for expert, weight in weights.items()}
    return {expert: weight * moe.scaling_factor for expert, weight in weights.items()}


def _within_capacity(chosen: dict[Any, dict[int, Tensor]], even: float) -> set[Any]:
    """The choices that remain: each expert keeps the largest weights, of equal ones the earlier token's."""
    kept = set()
    for expert in {expert for its in chosen.values() for expert in its}:
        takers = [(-round(its[expert].item(), 7), at) for at, its in chosen.items() if expert in its]
        kept |= {(at, expert) for _, at in sorted(takers)[: ceil(even)]}
    return kept


def _expert(x: Tensor, inner: Tensor, down: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        return down @ (F.silu(inner[0] @ x) * (inner[1] @ x))
    return down @ F.gelu(inner @ x)


def _losses(scored: dict[Any, Tensor], problem: Problem) -> tuple[Tensor, Tensor, float, list[int]]:
    """Balancing loss, z-loss and entropy, each the sum over the tokens that count (so: its mean times their number);
    and how many of these have each expert among their largest probabilities, where the next step's loss asks for it."""
    moe = problem.moe
    nothing = torch.zeros((), dtype=torch.float64)
    z = sum((one.exp().sum().log() ** 2 for one in scored.values()), start=nothing) * moe.z_loss_coeff
    scores = {at: one.sigmoid() if moe.score == "sigmoid" else one.exp() for at, one in scored.items()}
    probabilities = {at: one / one.sum() for at, one in scores.items()}
    entropy = -sum((one * one.log()).sum().item() for one in probabilities.values())
    largest = {at: one.argsort(descending=True)[: moe.top_k].tolist() for at, one in probabilities.items()}
    balance, balanced = nothing, [0] * moe.num_experts
    if moe.aux_loss == "global" and moe.aux_loss_coeff:
        balanced = [sum(expert in its for its in largest.values()) for expert in range(moe.num_experts)]
    groups = [[at for at in scored if at[1] == b] for b in range(BATCH)] if moe.aux_loss == "sequence" else [[*scored]]
    for tokens in filter(None, groups):
        t = len(tokens)
        for expert in range(moe.num_experts):
            share = problem.share[expert]
            if moe.aux_loss != "global":
                count = sum(expert in largest[at] for at in tokens)
                share = torch.tensor(count / (moe.top_k * t), dtype=torch.float64)
            mean = sum(probabilities[at][expert] for at in tokens) / t
            balance = balance + t * moe.aux_loss_coeff * moe.num_experts * share * mean
    return balance, z, entropy, balanced


def layer_of(problem: Problem, ranks: ExpertRanks | None = None, **options: Any) -> MoELayer:
    """A layer with the problem's values, on one rank of `ranks`."""
    ranks = ranks or ExpertRanks()
    name, outputs = ("gate_up", (2, WIDTH)) if problem.activation == "swiglu" else ("up", (WIDTH,))
    place = {"dtype": torch.float64, "device": torch.device("cpu")}
    activation: Callable[[Tensor], Tensor] = ACTIVATIONS[problem.activation]
    experts = Experts(problem.moe, HIDDEN, (name, outputs), activation, ranks, TpContext(**place), **options)
    router = Router(problem.moe, HIDDEN, **place)
    with torch.no_grad():
        router.weight.copy_(problem.router)
        router.expert_bias.copy_(problem.bias)
        router.share.copy_(problem.share)
        held, columns = slice_of(ranks)
        getattr(experts, name).weight.copy_(problem.inner[held][..., columns, :])
        experts.down.weight.copy_(problem.down[held][..., columns])
    return MoELayer(router, experts, ranks)


def slice_of(ranks: ExpertRanks, experts: int = 8) -> tuple[slice, slice]:
    """The experts that a rank holds, and the part of their width."""
    local, width = experts // ranks.ep, WIDTH // ranks.etp
    held, columns = ranks.ep_index * local, ranks.etp_index * width
    return slice(held, held + local), slice(columns, columns + width)


def solution_of(layer: MoELayer, problem: Problem, sequence: Any = None) -> Solution:
    """What the layer computes of the rank's part of the sequence; gradients of what the rank holds."""
    size, index = (1, 0) if sequence is None else (sequence.size, sequence.index)
    x, y_grad = (value.chunk(size)[index] for value in (problem.x, problem.y_grad))
    x = x.clone().requires_grad_()
    masks = masks_of(problem.mask, torch.tensor(SCALE, dtype=torch.float64), sequence)
    y, figures = layer(x, masks)
    (y * y_grad).sum().backward()
    inner, down = getattr(layer.experts, layer.experts.inner).weight.grad, layer.experts.down.weight.grad
    return Solution(y.detach(), figures, x.grad, layer.router.weight.grad, inner, down)


def assert_same(found: Solution, expected: Solution) -> None:
    for name, value in vars(expected).items():
        difference = (getattr(found, name) - value).abs().max()
        assert difference <= 1e-12 * max(1.0, float(value.abs().max())), f"{name}: {difference} of {value.abs().max()}"


def masks_of(mask: Tensor, scale: Tensor, sequence: TensorGroup | None = None) -> TokenMasks:
    """Of the labels [b, s] that count, in sequences that `sequence` divides evenly."""
    nothing = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    return TokenMasks.of(whole_batch(nothing, nothing, mask, nothing, None, 0), scale, sequence, sequence)
