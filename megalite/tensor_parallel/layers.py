"""Linear layers and the word embedding, split over the ranks of a tensor-parallel group.

Parameters keep the dims of their logical shape and hold this rank's shard of it, as the registry
(layout/parameters.py) cuts it; they are created without values. Without a group, or in one of a single rank, a layer
holds the whole and is the plain torch path. Each weight has one `main_grad`: None, or a tensor of its size (fp32, fp64
in fp64; compiled, [outputs, inputs]) to which backward adds the weight's gradient, in a fixed order; autograd then sees
none. Where a linear layer has `deferred` work, a backward that is collected leaves that for later.

A gradient is complete, but for what the registry calls partial: shared tails, and under sequence parallelism the bias
of a `RowParallelLinear`.
"""

import torch
from torch import Tensor, nn

from megalite.kernels.embed import embed
from megalite.layout.parameters import Split, shard_of
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.linear import linear
from megalite.tensor_parallel.mappings import (
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)


class ColumnParallelLinear(nn.Module):
    """Outputs split: weight [*local outputs, inputs], bias [*local outputs]; the product is over flattened outputs.

    `outputs` is the logical shape, `split` says how it is cut. The input is the same on all ranks, with
    `sequence_parallel` each rank's part of the sequence.
    """

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
    ) -> None:
        super().__init__()
        self.group = _beyond_one_rank(group)
        self.sequence_parallel = sequence_parallel and self.group is not None
        self.local_outputs = _local_shape(outputs, split, self.group)
        self.weight = nn.Parameter(torch.empty(*self.local_outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(self.local_outputs, dtype=dtype, device=device)) if bias else None
        self.main_grad: Tensor | None = None
        self.deferred: DeferredWork | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., prod(local outputs)]; with `sequence_parallel` [s/t, ..., inputs] -> [s, ...]."""
        return linear(
            x,
            self.weight.flatten(0, -2),
            None if self.bias is None else self.bias.flatten(),
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            main_grad=self.main_grad,
            deferred=self.deferred,
        )


class RowParallelLinear(nn.Module):
    """Inputs split: weight [outputs, inputs/t], bias [outputs]; the products of the ranks are summed.

    The input is this rank's part of the last dim. The output is the same on all ranks, with `sequence_parallel` this
    rank's part of the sequence. The bias is added once, after the sum.
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
    ) -> None:
        super().__init__()
        self.group = _beyond_one_rank(group)
        self.sequence_parallel = sequence_parallel
        shape = _local_shape((outputs, inputs), Split(1), self.group)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        self.main_grad: Tensor | None = None
        self.deferred: DeferredWork | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs/t] -> [..., outputs], with `sequence_parallel` [s, ..., inputs/t] -> [s/t, ..., outputs]."""
        bias = self.bias if self.group is None else None
        y = linear(x, self.weight, bias, main_grad=self.main_grad, deferred=self.deferred)
        if self.group is None:
            return y
        y = _sum(y, self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias


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
        self.main_grad: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """[s, b] -> [s, b, width], with `sequence_parallel` this rank's part [s/t, b, width]."""
        if self.group is None:
            return embed(tokens, self.weight, self.main_grad)
        rows = len(self.weight)
        row = tokens - self.first_row
        foreign = (row < 0) | (row >= rows)
        x = embed(row.clamp(0, rows - 1), self.weight, self.main_grad)
        return _sum(x.masked_fill(foreign.unsqueeze(-1), 0.0), self.group, self.sequence_parallel)


def _sum(x: Tensor, group: TensorGroup, sequence_parallel: bool) -> Tensor:
    """The sum of the ranks' x, or this rank's part of the sequence of it."""
    return reduce_scatter_to_sequence_parallel(x, group) if sequence_parallel else reduce_from_tensor_parallel(x, group)


def _beyond_one_rank(group: TensorGroup | None) -> TensorGroup | None:
    return None if group is None or group.size == 1 else group


def _local_shape(shape: tuple[int, ...], split: Split, group: TensorGroup | None) -> tuple[int, ...]:
    return shape if group is None else shard_of(shape, split, group.size, group.index).shape
