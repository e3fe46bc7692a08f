"""The experts of one layer in place of an MLP: route, bring tokens to their experts and back, count."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.moe.balance import AddToLoss, RouterMetrics, TokenMasks, add_router_losses, drop_over_capacity
from megalite.moe.dispatch import ExpertRanks, dispatch
from megalite.moe.experts import Experts
from megalite.moe.router import Choice, Router, count_choices


class MoELayer(nn.Module):
    """y = sum over a token's experts of weight * expert(x)."""

    def __init__(self, router: Router, experts: Experts, ranks: ExpertRanks) -> None:
        super().__init__()
        self.router, self.experts, self.ranks = router, experts, ranks

    def forward(
        self, x: Tensor, masks: TokenMasks, shared: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """[s, b, h] (or this rank's part of the sequence) -> the same, and its `RouterMetrics` as a row [2 E + 5].

        `shared` is an expert of all tokens, on [s, b, h]; it computes while tokens travel. While gradients are
        computed, the router's losses enter the loss here.
        """
        moe, tokens = self.router.moe, x.flatten(0, 1)
        logits = self.router.logits(tokens)
        choice = self.router.choose(logits)
        unmasked = choice.experts
        if masks.routed is not None:
            nobody = choice.experts.masked_fill(~masks.routed.unsqueeze(1), moe.num_experts)
            choice = Choice(nobody, choice.weights)
        chosen = choice.experts
        if moe.capacity_factor is not None and self.training:  # elsewhere a text would depend on those beside it
            choice = drop_over_capacity(choice, moe.num_experts, moe.capacity_factor, masks)
        zero, counts = logits.new_zeros(()), count_choices(chosen, moe.num_experts)
        dropped = (choice.experts != chosen).sum()
        metrics = RouterMetrics(counts, zero.expand_as(counts), dropped, zero, zero, zero, masks.scored.sum())
        if masks.scale is not None and torch.is_grad_enabled():
            metrics = add_router_losses(self.router, logits, unmasked, masks, metrics)
            loss = (metrics.balance + metrics.z) * masks.scale
            choice = Choice(choice.experts, AddToLoss.apply(choice.weights, loss))
        beside = None if shared is None else (lambda: shared(x).flatten(0, 1))
        y = dispatch(tokens, choice, moe.num_experts, self.experts, self.ranks, moe.dispatcher, beside)
        return y.view_as(x), metrics.as_row().detach()
