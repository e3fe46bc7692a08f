"""Training a mixture of experts with one mistake each: what the comparison with one process must catch. Most were once
in somebody's release."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from megalite.config.schema import Config
from megalite.kernels.grouped import RowGroups
from megalite.launch.context import ParallelContext
from megalite.model.gpt import Routers
from megalite.moe import balance as balance_module
from megalite.moe import dispatch as dispatch_module
from megalite.moe import layer as layer_module
from megalite.moe.balance import AddToLoss
from megalite.moe.experts import Experts
from megalite.moe.rows import Rows
from megalite.optim import gradients as gradients_module
from megalite.optim import rank_buffers as rank_buffers_module
from megalite.optim import zero as zero_module
from megalite.optim.zero import GradientSync
from megalite.tensor_parallel.mappings import gather_from_sequence_parallel
from megalite.train import step as step_module


def no_sum_of_router_gradients(context: ParallelContext, config: Config) -> None:
    """Over tp, whose ranks route a part of the sequence each."""
    is_partial = gradients_module._is_partial
    gradients_module._is_partial = lambda group, record, box: (
        is_partial(group, record, box) and "router" not in record.name
    )


def no_sum_of_sequence_counts(context: ParallelContext, config: Config) -> None:
    """A balancing loss of each rank's own part of the sequence."""
    balance_module.start_all_reduce = lambda counts, group: counts.clone()


def own_counts_move_the_bias(context: ParallelContext, config: Config) -> None:
    update = Routers.update
    Routers.update = lambda self, table, skip: update(self, self.figures(), skip)  # type: ignore[method-assign]


def counts_of_another_layer(context: ParallelContext, config: Config) -> None:
    """A rank of the pipeline takes its first layer for the model's first."""
    named = Routers._named
    Routers._named = lambda self: ((self._layers[at], one) for at, (_, one) in enumerate(named(self)))  # type: ignore[method-assign]


def experts_summed_over_dp(context: ParallelContext, config: Config) -> None:
    """Ranks of dp hold different experts."""
    groups = rank_buffers_module.replica_groups
    of_dense = lambda kind, **settings: groups("dense", **settings)  # noqa: E731
    rank_buffers_module.replica_groups = zero_module.replica_groups = of_dense


def expert_gradients_divided_by_ep(context: ParallelContext, config: Config) -> None:
    finish = GradientSync.finish

    def and_divide(self: GradientSync) -> None:
        finish(self)
        for bucket, gradients in zip(self._buffers.layout.buckets, self._buffers.gradients, strict=True):
            if bucket.kind == "expert":
                gradients /= context.layout.ep

    GradientSync.finish = and_divide  # type: ignore[method-assign]


def experts_counted_on_every_replica(context: ParallelContext, config: Config) -> None:
    """In the norm, where replicas keep the same optimizer state."""
    count = step_module.owned_for_norm
    step_module.owned_for_norm = lambda buffers, replicas, *, embeds: count(
        buffers, {**replicas, "expert": replace(replicas["expert"], replica=0)}, embeds=embeds
    )


def same_experts_drawn_everywhere(context: ParallelContext, config: Config) -> None:
    """Every rank takes its experts for the first ones."""
    lay_out = rank_buffers_module.buffer_layout
    rank_buffers_module.buffer_layout = lambda *records, ep, **sizes: lay_out(*records, ep=(ep[0], 0), **sizes)


def router_losses_not_attached(context: ParallelContext, config: Config) -> None:
    _with_router_losses(0, context, config)


def router_losses_of_every_microbatch_whole(context: ParallelContext, config: Config) -> None:
    """Not divided by the number of microbatches, of which there are two."""
    _with_router_losses(2, context, config)


def router_losses_divided_by_dp(context: ParallelContext, config: Config) -> None:
    _with_router_losses(1 / context.layout.dp, context, config)


def _with_router_losses(factor: float, context: ParallelContext, config: Config) -> None:
    add = AddToLoss.apply
    AddToLoss.apply = lambda x, loss: add(x, loss * factor)  # type: ignore[method-assign]


def no_gradient_of_the_weights(context: ParallelContext, config: Config) -> None:
    """Of the loss: the router learns from its own losses alone."""
    _change_experts(lambda self, rows, weights, groups: (rows, weights.detach() + 0 * weights, groups))


def weights_of_other_rows(context: ParallelContext, config: Config) -> None:
    """On the rank that holds the experts, where rows are sorted anew."""
    if context.rank == 1:
        _change_experts(lambda self, rows, weights, groups: (rows, weights.flip(0), groups))


Arguments = tuple[Tensor, Tensor, RowGroups]


def _change_experts(change: Callable[[Experts, Tensor, Tensor, RowGroups], Arguments]) -> None:
    forward = Experts.forward
    Experts.forward = lambda self, *given: forward(self, *change(self, *given))  # type: ignore[method-assign]


def rows_returned_in_the_experts_order(context: ParallelContext, config: Config) -> None:
    total = Rows.sum
    Rows.sum = lambda self, rows: rows if self.starts is None else total(self, rows)  # type: ignore[method-assign]


def no_sum_of_gathered_gradients(context: ParallelContext, config: Config) -> None:
    """Each rank keeps its own term of what all experts say of its tokens and weights."""
    dispatch_module.gather_for_terms = gather_from_sequence_parallel


def capacity_of_the_own_part(context: ParallelContext, config: Config) -> None:
    """Of the sequence, so that what is dropped depends on the layout."""
    drop = layer_module.drop_over_capacity
    tp = context.layout.tp
    layer_module.drop_over_capacity = lambda choice, experts, factor, masks: drop(
        choice, experts, factor, replace(masks, sequence=None, all_routed=masks.all_routed / tp)
    )
