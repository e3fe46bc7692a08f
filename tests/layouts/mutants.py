"""Training with one mistake each, in ranks that end with it: what the comparison with one process must catch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import Config
from megalite.kernels import attention as kernel_module
from megalite.kernels.dropout import DropoutStreams
from megalite.launch.context import ParallelContext
from megalite.model import block as block_module
from megalite.model import gpt as gpt_module
from megalite.model.loss import TokenLoss
from megalite.optim import rank_buffers as rank_buffers_module
from megalite.optim import zero as zero_module
from megalite.optim.zero import GradientSync, ParameterGather
from megalite.pipeline import executor as executor_module
from megalite.tensor_parallel import layers as layers_module
from megalite.tensor_parallel import linear as linear_module
from megalite.tensor_parallel import mappings
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.layers import RowParallelLinear, VocabParallelEmbedding
from megalite.train import step as step_module

Mutant = Callable[[ParallelContext, Config], None]


def no_sum_of_input_gradients(context: ParallelContext, config: Config) -> None:
    linear_module.start_all_reduce = lambda x, group, op="sum": x.clone()


def own_slice_of_input_gradients(context: ParallelContext, config: Config) -> None:
    """Under sequence parallelism: each rank keeps its rows of its own term."""
    linear_module.start_reduce_scatter = lambda x, group: x.chunk(group.size)[group.index].clone()


def own_output_gradient_everywhere(context: ParallelContext, config: Config) -> None:
    """A row-parallel layer's backward under sequence parallelism that does not gather."""
    _gather_rows_by(lambda grad, group: torch.cat([grad] * group.size))


def output_gradients_in_wrong_order(context: ParallelContext, config: Config) -> None:
    _gather_rows_by(lambda grad, group: torch.cat(mappings._gather(grad, group).chunk(group.size)[::-1]))


def _gather_rows_by(gather: Callable[[Tensor, TensorGroup], Tensor]) -> None:
    """For row-parallel layers without bias, under sequence parallelism; the embedding's sum stays as it is."""

    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        y = layers_module.linear(x, self.weight, main_grad=layers_module.main_grad_of(self.weight))
        return mappings.mapped(y, mappings._reduce_scatter, gather, self.place.tp)

    RowParallelLinear.forward = forward  # type: ignore[method-assign]


def no_sum_of_partial_gradients(context: ParallelContext, config: Config) -> None:
    step_module.sum_partial = lambda parts, group: None


def replicas_counted_on_every_rank(context: ParallelContext, config: Config) -> None:
    step_module.owned_for_norm = lambda buffers, replicas, *, embeds: buffers.gradients


def same_shard_drawn_everywhere(context: ParallelContext, config: Config) -> None:
    index = ParallelContext.index
    ParallelContext.index = lambda self, name: 0 if name == "tp" else index(self, name)  # type: ignore[method-assign]


def padding_in_the_loss(context: ParallelContext, config: Config) -> None:
    """Rows of the vocabulary that stand for no token, on the rank that has them."""
    _change_token_loss(lambda loss: setattr(loss, "real", loss.columns))


def columns_off_by_one_on_one_rank(context: ParallelContext, config: Config) -> None:
    """In the loss: rank 1 believes its part of the uneven rows to start one later."""
    if context.index("tp") == 1:
        _change_token_loss(lambda loss: setattr(loss, "first", loss.first + 1))


def rows_off_by_one_on_one_rank(context: ParallelContext, config: Config) -> None:
    """In the embedding."""
    forward = VocabParallelEmbedding.forward

    def shifted(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
        return forward(self, tokens - 1)

    if context.index("tp") == 1:
        VocabParallelEmbedding.forward = shifted  # type: ignore[method-assign]


def smoothing_over_the_local_part(context: ParallelContext, config: Config) -> None:
    """Each rank's mean is over its own columns of the vocabulary."""
    combine = TokenLoss.combine

    def combine_alone(self: TokenLoss, statistics: Tensor) -> tuple[Tensor, Tensor]:
        assert self.group is not None
        local = statistics.clone()
        local[:, 3:] = 0
        local[self.group.index, 3:] = statistics[self.group.index, 3:]
        return combine(self, local)

    TokenLoss.combine = combine_alone  # type: ignore[method-assign]
    _change_token_loss(lambda loss: setattr(loss, "vocab_size", loss.real))


def _change_token_loss(change: Callable[[TokenLoss], None]) -> None:
    """What every loss of this rank's columns has worked out is changed."""
    work_out = TokenLoss.__post_init__

    def changed(self: TokenLoss) -> None:
        work_out(self)
        change(self)

    TokenLoss.__post_init__ = changed  # type: ignore[method-assign]


def mask_ignored_on_one_rank(context: ParallelContext, config: Config) -> None:
    loss = gpt_module.linear_cross_entropy

    def unmasked(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, *rest: Any, **settings: Any) -> Tensor:
        return loss(hidden, weight, labels, torch.ones_like(mask), *rest, **settings)

    if context.rank == 1:
        gpt_module.linear_cross_entropy = unmasked


def other_mask_when_recomputed(context: ParallelContext, config: Config) -> None:
    """Residual dropout."""
    drop = block_module.hash_dropout
    block_module.hash_dropout = lambda x, p, key: drop(x, p, replace(key, rows=key.rows + _in_backward()))


def other_attention_mask_when_rebuilt(context: ParallelContext, config: Config) -> None:
    drop = kernel_module.hash_dropout
    kernel_module.hash_dropout = lambda x, p, key: drop(x, p, replace(key, rows=key.rows + _in_backward()))


def heads_counted_from_each_ranks_first(context: ParallelContext, config: Config) -> None:
    """Ranks drop the same places of different heads."""
    keys = DropoutStreams.attention_keys
    DropoutStreams.attention_keys = (  # type: ignore[method-assign]
        lambda self, samples, heads, positions: keys(self, samples, heads - heads[0], positions)
    )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _AtLast:
    """A collective that nothing moves before it is waited for."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    def wait(self) -> None:
        self._start().wait()


def gather_at_the_last_moment(context: ParallelContext, config: Config) -> None:
    """No mistake, but the worst network."""
    start = zero_module.bucket_all_gather
    zero_module.bucket_all_gather = lambda bucket, group: _AtLast(lambda: start(bucket, group))


def use_before_arrival(context: ParallelContext, config: Config) -> None:
    """Of all parts but the blocks on that network."""
    wait_for = ParameterGather.wait_for
    ParameterGather.wait_for = (  # type: ignore[method-assign]
        lambda self, part: wait_for(self, part) if part.startswith("blocks") else None
    )
    ParameterGather.finish = (  # type: ignore[method-assign]
        lambda self: [wait_for(self, part) for part in self._buckets_of]  # type: ignore[return-value]
    )
    gather_at_the_last_moment(context, config)


def no_gather_of_parameters(context: ParallelContext, config: Config) -> None:
    ParameterGather.start = lambda self: None  # type: ignore[method-assign]


class _Done:
    def wait(self) -> None:
        pass


def no_sum_across_instances(context: ParallelContext, config: Config) -> None:
    zero_module.bucket_all_reduce = lambda tensor, group, *, comm_dtype: _Done()


def no_sum_inside_instances(context: ParallelContext, config: Config) -> None:
    zero_module.bucket_reduce_scatter = lambda bucket, group, *, comm_dtype: _Done()


def instances_counted_twice(context: ParallelContext, config: Config) -> None:
    count = step_module.owned_for_norm
    step_module.owned_for_norm = lambda buffers, replicas, *, embeds: count(
        buffers, {kind: replace(place, replica=0) for kind, place in replicas.items()}, embeds=embeds
    )


def next_rank_s_slices(context: ParallelContext, config: Config) -> None:
    """Each rank updates what its neighbour has the gradient of."""
    of = rank_buffers_module.RankBuffers.index.fget  # type: ignore[attr-defined]
    rank_buffers_module.RankBuffers.index = property(  # type: ignore[assignment, method-assign]
        lambda self: {kind: (at + 1) % len(self.owners[kind]) for kind, at in of(self).items()}
    )


def sent_before_the_last_gradient(context: ParallelContext, config: Config) -> None:
    init = GradientSync.__init__

    def one_less(self: GradientSync, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._watched = [max(1, count - 1) for count in self._watched]
        self._missing = [*self._watched]

    GradientSync.__init__ = one_less  # type: ignore[method-assign]
    read_at_once(context, config)


def read_at_once(context: ParallelContext, config: Config) -> None:
    """What is sent is read at once."""
    start = zero_module.bucket_reduce_scatter

    def at_once(bucket: Tensor, group: Any, *, comm_dtype: torch.dtype) -> Any:
        start(bucket, group, comm_dtype=comm_dtype).wait()
        return _Done()

    zero_module.bucket_reduce_scatter = at_once


class _Everything(dict[int, Any]):
    def __contains__(self, chunk: object) -> bool:
        return True

    def __missing__(self, chunk: int) -> Any:
        return lambda start: start()


def sent_before_the_last_microbatch(context: ParallelContext, config: Config) -> None:
    """Each microbatch is taken for the last."""
    ready = GradientSync._watch

    def watch_always(self: GradientSync, parameter: Any, chunk: int, number: int) -> None:
        self._last = _Everything()
        ready(self, parameter, chunk, number)

    GradientSync._watch = watch_always  # type: ignore[method-assign]
    read_at_once(context, config)


def decay_of_everything(context: ParallelContext, config: Config) -> None:
    held = rank_buffers_module.records_of
    rank_buffers_module.records_of = lambda config, pp_rank: [
        replace(record, decay=True) for record in held(config, pp_rank)
    ]


def mean_of_local_means(context: ParallelContext, config: Config) -> None:
    """The classic mistake: each rank divides by its own tokens, then gradients are averaged."""
    forward_backward = executor_module.Executor.forward_backward

    def broken(self: Any, batches: Any, scale: Tensor) -> Tensor:
        own = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
        total = own.clone()
        dist.all_reduce(total)
        return forward_backward(self, batches, scale * total / (own * context.size("dp")))

    executor_module.Executor.forward_backward = broken  # type: ignore[method-assign]


# --- pipelines -------------------------------------------------------------------------------------------------------


def no_sum_over_tied_embeddings(context: ParallelContext, config: Config) -> None:
    of = step_module.partial_gradients
    step_module.partial_gradients = lambda buffers, context: [
        each for each in of(buffers, context) if each[1] != context.group("word-embedding")
    ]


def tied_embeddings_counted_twice(context: ParallelContext, config: Config) -> None:
    count = step_module.owned_for_norm
    step_module.owned_for_norm = lambda buffers, replicas, *, embeds: count(buffers, replicas, embeds=True)


def weight_gradients_forgotten(context: ParallelContext, config: Config) -> None:
    """Of the last microbatch."""
    compute = executor_module._Run.compute

    def forgetful(self: Any, action: Any) -> None:
        if action.kind != "backward-weight" or action.microbatch < len(self._batches) - 1:
            compute(self, action)

    executor_module._Run.compute = forgetful  # type: ignore[method-assign]


def sync_before_the_weight_gradients(context: ParallelContext, config: Config) -> None:
    expect_last = GradientSync.expect_last
    GradientSync.expect_last = (  # type: ignore[method-assign]
        lambda self, chunk, later: expect_last(self, chunk, lambda start: start())
    )
    read_at_once(context, config)


def activations_of_another_microbatch(context: ParallelContext, config: Config) -> None:
    """The data of the first for all of them, where tokens do not enter."""
    forward = executor_module._Run._forward

    def of_the_first(self: Any, action: Any) -> None:
        batches = self._batches
        if not self._chunks[action.chunk].embeds:
            self._batches = [batches[0]] * len(batches)
        forward(self, action)
        self._batches = batches

    executor_module._Run._forward = of_the_first  # type: ignore[method-assign]


def loss_told_by_every_stage(context: ParallelContext, config: Config) -> None:
    executor_train = executor_module.Executor.forward_backward
    executor_module.Executor.forward_backward = (  # type: ignore[method-assign]
        lambda self, batches, scale: executor_train(self, batches, scale) + scale
    )
    init = step_module.TrainStep.__init__

    def and_tell(self: Any, *args: Any) -> None:
        init(self, *args)
        self._adds_loss = True

    step_module.TrainStep.__init__ = and_tell  # type: ignore[method-assign]
