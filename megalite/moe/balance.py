"""What keeps experts evenly used: the router's losses, the biases of the choice, and the metrics that users see.

A microbatch's balancing loss is coefficient * E / (k T^2) * sum over experts of (tokens that chose it * sum of its
probabilities), over its T unmasked tokens wherever they are (Switch, arXiv 2101.03961); `sequence` takes each sequence
for itself, `global` the shares of the step before for those of the tokens. Experts that a token "chose" are here those
of its largest probabilities, whatever groups, biases and capacities say (as in Megatron-core). Each loss has the weight
of its unmasked tokens among those of the step: the layout changes nothing, nor does the number of microbatches but for
what one of them holds. The z-loss is coefficient * mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config.schema import MoEConfig
from megalite.data.batch import Batch
from megalite.moe.router import Choice, Router, count_choices, top_experts
from megalite.tensor_parallel.collectives import TensorGroup, finish, start_all_gather, start_all_reduce

AFTER_COUNTS = 5  # numbers that follow both counts of experts in `RouterMetrics`


@dataclass(frozen=True)
class TokenMasks:
    """What routers must know of a microbatch of b sequences; t tokens are this rank's.

    `routed` [t]: False at padding, which no expert sees; None: all are. `scored` [t]: tokens whose labels count.
    `lengths` [b]: how many of each whole sequence count. `all_routed` (0-d): tokens of the whole microbatch, on all
    ranks that divide its sequences, that are no padding. `scale` (0-d) multiplies sums over tokens; None: no losses.
    `sequence`: the ranks that divide each sequence; `order` [s]: which of the tokens that are gathered from them comes
    first in its sequence, and so on; None: as they come.
    """

    routed: Tensor | None
    scored: Tensor
    lengths: Tensor
    all_routed: Tensor
    scale: Tensor | None
    sequence: TensorGroup | None
    order: Tensor | None

    @classmethod
    def of(
        cls,
        batch: Batch,
        scale: Tensor | None,
        sequence: TensorGroup | None,
        split: TensorGroup | None = None,
        *,
        ordered: bool = False,
    ) -> "TokenMasks":
        """`split`: the ranks that divide the batch's tokens once more (sequence parallelism). With a `scale` a sequence
        of which nothing counts is padding. `ordered`: the order of the tokens is asked for, by capacities: a gather."""
        scored, places, order = batch.loss_mask.t(), batch.places, None  # [n, b], [n]
        if split is not None:
            scored, places = (part.chunk(split.size)[split.index] for part in (scored, places))
        if ordered and sequence is not None and len(batch.places) < batch.length:
            order = finish(start_all_gather(places, sequence)).argsort()
        real = torch.ones_like(batch.counted, dtype=torch.bool) if scale is None else batch.counted > 0
        routed = None if scale is None else real.expand_as(scored).flatten()
        return cls(routed, scored.flatten(), batch.counted, real.sum() * batch.length, scale, sequence, order)


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """x [s * b, ...] with the tokens of its places in another order [s]."""
    return x.view(len(order), -1, *x.shape[1:]).index_select(0, order).flatten(0, 1)


class RouterMetrics(NamedTuple):
    """Sums over the tokens of one layer: how many chose each expert [E], how many unmasked tokens it has for the
    balancing loss [E] (with aux_loss=global, else 0), dropped choices, both losses times the tokens, the entropy of the
    probabilities, and tokens. All fields are 0-d except the counts."""

    counts: Tensor
    balanced: Tensor
    dropped: Tensor
    balance: Tensor
    z: Tensor
    entropy: Tensor
    tokens: Tensor

    def as_row(self) -> Tensor:
        """[2 E + 5], fp64"""
        counts = self.counts.double(), self.balanced.double()
        return torch.cat([*counts, torch.stack([one.double() for one in self[2:]])])


def counts_of(table: Tensor) -> tuple[Tensor, Tensor]:
    """`counts` and `balanced` of rows of `RouterMetrics`: [layers, 2 E + 5] -> [layers, E] each."""
    counts, balanced = table[:, :-AFTER_COUNTS].chunk(2, dim=1)
    return counts, balanced


def in_numbers(table: Tensor) -> dict[str, Any]:
    """What users see of rows of `RouterMetrics` [layers, 2 E + 5], or of sums over steps. NaN where there was no token.

    A layer's imbalance is the most choices of an expert over the mean; losses and entropy are means over layers.
    """
    counts, _ = counts_of(table)
    dropped, *sums, tokens = table[:, -AFTER_COUNTS:].unbind(1)
    imbalance = counts.amax(1) / counts.mean(1)
    balance, z, entropy = ((its / tokens).mean().item() for its in sums)
    return {
        "imbalance_max": imbalance.max().item(),
        "imbalance_mean": imbalance.mean().item(),
        "dropped_share": (dropped.sum() / counts.sum()).item(),
        "balancing_loss": balance,
        "z_loss": z,
        "entropy": entropy,
        "tokens_per_expert": counts.long().tolist(),
    }


def add_router_losses(
    router: Router, logits: Tensor, experts: Tensor, masks: TokenMasks, metrics: RouterMetrics
) -> RouterMetrics:
    """`metrics` with the losses of logits [t, E], for which the router chose `experts` [t, k]: sums over this rank's
    tokens, whose sum over all ranks is the microbatch's. A loss without a coefficient stays 0, and is free."""
    moe = router.moe
    probabilities = router.probabilities(logits).masked_fill(~masks.scored.unsqueeze(1), 0.0)
    if moe.aux_loss_coeff:
        by_sequence = probabilities.unflatten(0, (-1, len(masks.lengths))).sum(0)  # [b, E]; tokens are [s, b]
        counted = _counts(router, logits, experts, masks)
        if moe.aux_loss == "global":
            shares, metrics = router.share, metrics._replace(balanced=counted.sum(0))
        else:
            shares = _shares(counted, moe, masks)
        metrics = metrics._replace(balance=moe.num_experts * moe.aux_loss_coeff * (shares * by_sequence).sum())
    if moe.z_loss_coeff:
        squares = logits.logsumexp(1).square().masked_fill(~masks.scored, 0.0)
        metrics = metrics._replace(z=moe.z_loss_coeff * squares.sum())
    with torch.no_grad():
        return metrics._replace(entropy=-torch.special.xlogy(probabilities, probabilities).sum())


@torch.no_grad()
def _counts(router: Router, logits: Tensor, experts: Tensor, masks: TokenMasks) -> Tensor:
    """How many of this rank's unmasked tokens of each sequence have each expert among their k largest [b, E]."""
    moe, sequences = router.moe, len(masks.lengths)
    own = torch.arange(len(logits), device=logits.device) % sequences  # the sequence of each token
    # Groups and biases change the choice of experts, not what this loss counts.
    largest = moe.score == "softmax" and moe.num_groups == 1
    counted = experts if largest else top_experts(logits, moe.top_k)
    chosen = own.unsqueeze(1) * moe.num_experts + counted  # [t, k]
    counts = logits.new_zeros(sequences * moe.num_experts)
    counts.scatter_add_(0, chosen.flatten(), masks.scored.to(counts.dtype).repeat_interleave(moe.top_k))
    return counts.view(sequences, -1)


@torch.no_grad()
def _shares(counts: Tensor, moe: MoEConfig, masks: TokenMasks) -> Tensor:
    """Each expert's share [1, E] of the choices in `counts` [b, E], summed over the ranks that divide the sequences;
    with `sequence`, its share of each sequence's choices [b, E]."""
    lengths = masks.lengths.to(counts.dtype)
    if moe.aux_loss != "sequence":
        counts, lengths = counts.sum(0, keepdim=True), lengths.sum(0, keepdim=True)
    if masks.sequence is not None:
        counts = finish(start_all_reduce(counts, masks.sequence))
    return counts / (moe.top_k * lengths.clamp(min=1).unsqueeze(1))


class AddToLoss(torch.autograd.Function):
    """x; whatever loss is made of it, `loss` (0-d) is added to that: it enters where backward passes x, which is
    Megatron-core's way for a loss from the middle of a model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.saved_tensors[0]


@torch.no_grad()
def drop_over_capacity(choice: Choice, num_experts: int, factor: float, masks: TokenMasks) -> Choice:
    """`choice` without what is beyond the experts' capacity: factor * k / E of the microbatch's tokens, rounded up.

    An expert keeps the choices with the largest weights, of equal ones the earlier token's, of the whole microbatch:
    with a divided sequence that takes a gather of k numbers and k weights per token.
    """
    experts, weights = choice
    k = experts.shape[1]
    if masks.sequence is not None:
        experts, weights = (finish(start_all_gather(part, masks.sequence)) for part in choice)
    if masks.order is not None:
        experts, weights = _rows(experts, masks.order), _rows(weights, masks.order)
    # In fp64: 1.2 * 10 / 2 is 6, and must not become 7.
    even = masks.all_routed.double() * k / num_experts
    capacity = (even * factor - 1e-9).ceil()
    flat = experts.flatten()
    # 8 digits of fp64 weights: equal tokens (the first of two documents) have equal weights but for rounding.
    order = weights.flatten().float().argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]  # by expert, inside by weight
    counts = count_choices(flat, num_experts + 1)  # the last: those of nobody
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    kept = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, place < capacity).view_as(experts)
    if masks.order is not None:
        kept = _rows(kept, masks.order.argsort())
    if masks.sequence is not None:
        kept = kept.chunk(masks.sequence.size)[masks.sequence.index]
    return Choice(choice.experts.masked_fill(~kept, num_experts), choice.weights)


@torch.no_grad()
def update_router(router: Router, counts: Tensor, balanced: Tensor, skip: Tensor) -> None:
    """After a step: each expert's bias moves by the rate towards even use, and its share is noted for `global`.

    `counts` and `balanced` [E] are `RouterMetrics` of the step on all ranks. Nothing changes where `skip` (0-d) is 1,
    nor does a share of nothing.
    """
    router.expert_bias += router.moe.expert_bias_rate * (counts.mean() - counts).sign() * (1.0 - skip)
    total = balanced.sum()
    router.share.copy_(torch.where((skip > 0) | (total == 0), router.share, balanced / total.clamp(min=1)))
