"""Linear layers and the word embedding, split over the ranks of a tensor-parallel group.

Parameters keep the dims of their logical shape and hold this rank's shard of it, as the registry
(parallel/parameters.py) cuts it; they are created without values. Without a group, or in one of a single rank, a layer
holds the whole and is the plain torch path. Each weight has one `grad_sink`: None, or a tensor of its size (fp32, fp64
in fp64; compiled, [outputs, inputs]) to which backward adds the weight's gradient, in a fixed order; autograd then sees
none. Where a linear layer has `deferred` work, a backward that is collected leaves that for later.

A gradient is complete, but for what the registry calls partial: shared tails, and under sequence parallelism the bias
of a `RowParallelLinear`.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.parameters import Split, shard_of
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.linear import linear
from megalite.tensor_parallel.mappings import (
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_tensor_parallel,
)

LayerOutput = Tensor | tuple[Tensor, Tensor | None]


class ColumnParallelLinear(nn.Module):
    """Outputs split: weight [*local outputs, inputs], bias [*local outputs]; the product is over flattened outputs.

    `outputs` is the logical shape, `split` says how it is cut. The input is the same on all ranks, with
    `sequence_parallel` each rank's part of the sequence. With `gather_output` every rank returns all logical outputs;
    what follows must be the same on every rank. With `skip_bias_add` the bias is not added but returned.
    """

    order: Tensor  # with `gather_output`, int64 [prod(outputs)]: where each is in what was gathered

    def __init__(
        self,
        outputs: tuple[int, ...],
        inputs: int,
        split: Split,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup | None = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__()
        self.group = _beyond_one_rank(group)
        self.sequence_parallel = sequence_parallel and self.group is not None
        self.gather_output = gather_output and self.group is not None
        self.skip_bias_add = skip_bias_add
        self.local_outputs = _local_shape(outputs, split, self.group)
        self.weight = nn.Parameter(torch.empty(*self.local_outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(self.local_outputs, dtype=dtype, device=device)) if bias else None
        self.grad_sink: Tensor | None = None
        self.deferred: DeferredWork | None = None
        if self.gather_output:
            assert self.group is not None
            self.padded_outputs, order = _gathered_order(outputs, split, self.group.size)
            self.register_buffer("order", order.to(device), persistent=False)

    def forward(self, x: Tensor) -> LayerOutput:
        """[..., inputs] -> [..., prod(local outputs)], or gathered [..., prod(outputs)]; with it the bias if skipped.

        With `sequence_parallel` [s/t, ..., inputs] -> [s, ..., the same].
        """
        bias = None if self.bias is None else self.bias.flatten()
        y = linear(
            x,
            self.weight.flatten(0, -2),
            None if self.skip_bias_add else bias,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            grad_sink=self.grad_sink,
            deferred=self.deferred,
        )
        if self.gather_output:
            y = self._gather(y)
            bias = self._gather(bias) if bias is not None and self.skip_bias_add else bias
        return (y, bias) if self.skip_bias_add else y

    def _gather(self, y: Tensor) -> Tensor:
        """[..., prod(local outputs)] -> [..., prod(outputs)]"""
        padded = F.pad(y, (0, self.padded_outputs - y.shape[-1]))
        return gather_from_tensor_parallel(padded, self.group).index_select(-1, self.order)


class RowParallelLinear(nn.Module):
    """Inputs split: weight [outputs, inputs/t], bias [outputs]; the products of the ranks are summed.

    The input is this rank's part of the last dim; not `input_is_parallel`: the same on all ranks, of which each takes
    its part. The output is the same on all ranks, with `sequence_parallel` this rank's part of the sequence. The bias
    is added once, after the sum; with `skip_bias_add` it is not added but returned.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup | None = None,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__()
        self.group = _beyond_one_rank(group)
        self.sequence_parallel = sequence_parallel
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        shape = _local_shape((outputs, inputs), Split(1), self.group)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        self.grad_sink: Tensor | None = None
        self.deferred: DeferredWork | None = None

    def forward(self, x: Tensor) -> LayerOutput:
        """[..., inputs/t] (or [..., inputs]) -> [..., outputs]; with it the bias if skipped.

        With `sequence_parallel` [s, ..., inputs/t] -> [s/t, ..., outputs].
        """
        if not self.input_is_parallel:
            x = scatter_to_tensor_parallel(x, self.group)
        bias = None if self.skip_bias_add else self.bias
        y = linear(
            x,
            self.weight,
            bias if self.group is None else None,
            grad_sink=self.grad_sink,
            deferred=self.deferred,
        )
        if self.group is not None:
            y = _sum(y, self.group, self.sequence_parallel)
            y = y if bias is None else y + bias
        return (y, self.bias) if self.skip_bias_add else y


class VocabParallelEmbedding(nn.Module):
    """Rows split: weight [rows of this rank, width]; rank i of t has the rows [i * rows // t, (i + 1) * rows // t).

    Each rank looks up the tokens whose rows it has and contributes zeros for the others, which get no gradient here.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group = _beyond_one_rank(group)
        self.sequence_parallel = sequence_parallel
        size, index = (1, 0) if self.group is None else (self.group.size, self.group.index)
        part = shard_of((rows, width), Split(0, uneven=True), size, index)
        self.first_row = part.boxes[0].offsets[0]
        self.weight = nn.Parameter(torch.empty(part.shape, dtype=dtype, device=device))
        self.grad_sink: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """[s, b] -> [s, b, width], with `sequence_parallel` this rank's part [s/t, b, width]."""
        if self.group is None:
            return _embed(tokens, self.weight, self.grad_sink)
        rows = len(self.weight)
        row = tokens - self.first_row
        foreign = (row < 0) | (row >= rows)
        x = _embed(row.clamp(0, rows - 1), self.weight, self.grad_sink)
        return _sum(x.masked_fill(foreign.unsqueeze(-1), 0.0), self.group, self.sequence_parallel)


class _SunkEmbedding(torch.autograd.Function):
    """F.embedding whose gradient is added to `sink` [rows, h]; autograd sees none.

    Autograd's own is a dense tensor of the table's size per microbatch, in its dtype. The sink receives the rows of the
    batch's tokens in its own dtype; on a CPU nothing else is touched.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, sink: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink = sink
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        add_rows(ctx.sink, tokens.flatten(), grads[0].flatten(0, -2).to(ctx.sink.dtype))
        return None, None, None


def add_rows(sink: Tensor, rows: Tensor, values: Tensor) -> None:
    """sink[rows[i]] += values[i], repeated rows added up in a fixed order. sink [rows, h], rows [n], values [n, h]."""
    if sink.is_cuda:  # index_add_ would add by atomics, in any order; the embedding's own backward sorts
        sink += torch.ops.aten.embedding_dense_backward(values, rows, len(sink), -1, False)
    else:
        sink.index_add_(0, rows, values)


def _embed(tokens: Tensor, weight: Tensor, sink: Tensor | None) -> Tensor:
    embedded: Tensor = F.embedding(tokens, weight) if sink is None else _SunkEmbedding.apply(tokens, weight, sink)
    return embedded


def _sum(x: Tensor, group: TensorGroup, sequence_parallel: bool) -> Tensor:
    """The sum of the ranks' x, or this rank's part of the sequence of it."""
    return reduce_scatter_to_sequence_parallel(x, group) if sequence_parallel else reduce_from_tensor_parallel(x, group)


def _beyond_one_rank(group: TensorGroup | None) -> TensorGroup | None:
    return None if group is None or group.size == 1 else group


def _local_shape(shape: tuple[int, ...], split: Split, group: TensorGroup | None) -> tuple[int, ...]:
    return shape if group is None else shard_of(shape, split, group.size, group.index).shape


def _gathered_order(outputs: tuple[int, ...], split: Split, size: int) -> tuple[int, Tensor]:
    """The largest local number of outputs, and where each logical output is when the ranks' outputs, padded to that,
    lie one after another: int64 [prod(outputs)]. Of replicas the first is taken, to which then goes all the gradient.
    """
    shards = [shard_of(outputs, split, size, index) for index in range(size)]
    width = max(prod(part.shape) for part in shards)
    order = torch.empty(outputs, dtype=torch.int64)
    for index, part in enumerate(shards):
        places = index * width + torch.arange(prod(part.shape)).view(part.shape)
        for box in part.boxes:
            if box.counted:
                order[box.logical] = places[box.local]
    return width, order.flatten()
