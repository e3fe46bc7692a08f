"""Training with one mistake each, in ranks that end with it: what the comparison with one process must catch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.model import block as block_module
from megalite.model import gpt as gpt_module
from megalite.optim.buffers import BufferLayout
from megalite.optim.partial import PartialGradients
from megalite.parallel.context import ParallelContext
from megalite.tensor_parallel import layers as layers_module
from megalite.tensor_parallel import linear as linear_module
from megalite.tensor_parallel import mappings
from megalite.tensor_parallel import recompute as recompute_module
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.cross_entropy import TokenLoss
from megalite.tensor_parallel.layers import RowParallelLinear, VocabParallelEmbedding
from tests.layouts.training import Trace, train


def no_sum_of_input_gradients(context: ParallelContext, config: Config) -> Trace:
    linear_module.start_all_reduce = lambda x, group, op="sum": x.clone()
    return train(context, config)


def own_slice_of_input_gradients(context: ParallelContext, config: Config) -> Trace:
    """Under sequence parallelism: each rank keeps its rows of its own term."""
    linear_module.start_reduce_scatter = lambda x, group: x.chunk(group.size)[group.index].clone()
    return train(context, config)


def own_output_gradient_everywhere(context: ParallelContext, config: Config) -> Trace:
    """A row-parallel layer's backward under sequence parallelism that does not gather."""
    _gather_rows_by(lambda grad, group: torch.cat([grad] * group.size))
    return train(context, config)


def output_gradients_in_wrong_order(context: ParallelContext, config: Config) -> Trace:
    _gather_rows_by(lambda grad, group: torch.cat(mappings._gather(grad, group).chunk(group.size)[::-1]))
    return train(context, config)


def _gather_rows_by(gather: Callable[[Tensor, TensorGroup], Tensor]) -> None:
    """For row-parallel layers without bias, under sequence parallelism; the embedding's sum stays as it is."""

    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        y = layers_module.linear(x, self.weight, grad_sink=self.grad_sink)
        return mappings._map(y, mappings._reduce_scatter, gather, self.group)

    RowParallelLinear.forward = forward  # type: ignore[method-assign]


def no_sum_of_partial_gradients(context: ParallelContext, config: Config) -> Trace:
    PartialGradients.sum = lambda self: None  # type: ignore[method-assign]
    return train(context, config)


def replicas_counted_on_every_rank(context: ParallelContext, config: Config) -> Trace:
    BufferLayout.counted = lambda self, buffer: [buffer]  # type: ignore[method-assign]
    return train(context, config)


def same_shard_drawn_everywhere(context: ParallelContext, config: Config) -> Trace:
    index = ParallelContext.index
    ParallelContext.index = lambda self, name: 0 if name == "tp" else index(self, name)  # type: ignore[method-assign]
    return train(context, config)


def padding_in_the_loss(context: ParallelContext, config: Config) -> Trace:
    """Rows of the vocabulary that stand for no token, on the rank that has them."""
    _change_token_loss(lambda loss, columns: replace(loss, real=columns))
    return train(context, config)


def columns_off_by_one_on_one_rank(context: ParallelContext, config: Config) -> Trace:
    """In the loss: rank 1 believes its part of the uneven rows to start one later."""
    if context.index("tp") == 1:
        _change_token_loss(lambda loss, columns: replace(loss, first=loss.first + 1))
    return train(context, config)


def rows_off_by_one_on_one_rank(context: ParallelContext, config: Config) -> Trace:
    """In the embedding."""
    forward = VocabParallelEmbedding.forward

    def shifted(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        return forward(self, tokens - 1)

    if context.index("tp") == 1:
        VocabParallelEmbedding.forward = shifted  # type: ignore[method-assign]
    return train(context, config)


def smoothing_over_the_local_part(context: ParallelContext, config: Config) -> Trace:
    """Each rank's mean is over its own columns of the vocabulary."""
    combine = TokenLoss.combine

    def combine_alone(self: TokenLoss, statistics: Tensor) -> tuple[Tensor, Tensor]:
        assert self.group is not None
        local = statistics.clone()
        local[:, 3] = 0
        local[self.group.index, 3] = statistics[self.group.index, 3]
        return combine(self, local)

    TokenLoss.combine = combine_alone  # type: ignore[method-assign]
    _change_token_loss(lambda loss, columns: replace(loss, vocab_size=loss.real))
    return train(context, config)


def _change_token_loss(change: Callable[[TokenLoss, int], TokenLoss]) -> None:
    """`change(loss, columns)` instead of every loss of this rank's columns."""
    of = TokenLoss.of
    TokenLoss.of = lambda columns, *args, **settings: change(  # type: ignore[method-assign]
        of(columns, *args, **settings), columns
    )


def mask_ignored_on_one_rank(context: ParallelContext, config: Config) -> Trace:
    loss = gpt_module.linear_cross_entropy

    def unmasked(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, scale: Tensor, **settings: Any
    ) -> Tensor:
        return loss(hidden, weight, labels, torch.ones_like(mask), scale, **settings)

    if context.rank == 1:
        gpt_module.linear_cross_entropy = unmasked
    return train(context, config)


def other_mask_when_recomputed(context: ParallelContext, config: Config) -> Trace:
    """Residual dropout."""
    drop = block_module.hash_dropout
    block_module.hash_dropout = lambda x, p, key: drop(x, p, replace(key, rows=key.rows + _in_backward()))
    return train(context, config)


def attention_not_seeded_when_recomputed(context: ParallelContext, config: Config) -> Trace:
    seed = gpt_module.seed_attention_dropout
    gpt_module.seed_attention_dropout = lambda *args: None if _in_backward() else seed(*args)
    return train(context, config)


def generator_not_restored_when_rebuilt(context: ParallelContext, config: Config) -> Trace:
    states = recompute_module._generators
    recompute_module._generators = lambda device, _: states(device, None)
    return train(context, config)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
