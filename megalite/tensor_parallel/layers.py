"""Linear layers and the word embedding, split over the ranks of a tensor-parallel group.

Parameters keep the dims of their logical shape and hold this rank's shard of it, as its record cuts it
(layout/parameters.py); they are created without values. Gradients go to main gradients (kernels/embed.py), where
parameters have them. A gradient is complete, but for what the record calls partial.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.kernels.embed import embed, main_grad_of, with_main_grad
from megalite.kernels.fp8 import Recipe
from megalite.layout.parameters import ROWS, Split, shard_of
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.linear import linear
from megalite.tensor_parallel.mappings import reduce_from_tensor_parallel, reduce_scatter_to_sequence_parallel


@dataclass(frozen=True)
class TpContext:
    """Where the tensors of a model live, and the ranks of `tp` among which each layer is split (None: it is whole).

    Where the ranks of `sequence`, which are those of `tp`, divide the sequence between the layers, activations there
    are this rank's part of it, [s/t, b, h]; else they are whole on every rank, [s, b, h]. `deferred` is where linear
    layers put off weight gradients, `fp8` how they round what they multiply (kernels/fp8.py).
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorGroup | None = None
    sequence: TensorGroup | None = None
    deferred: DeferredWork | None = None
    fp8: Recipe | None = None

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter without values."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))

    def local_shape(self, shape: tuple[int, ...], split: Split) -> tuple[int, ...]:
        """This rank's part of a logical shape."""
        return shape if self.tp is None else shard_of(shape, split, self.tp.size, self.tp.index).shape

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, with sequence parallelism this rank's part of it: [s, ...] -> [s/t, ...]."""
        if self.sequence is not None:
            return reduce_scatter_to_sequence_parallel(x, self.sequence)
        return reduce_from_tensor_parallel(x, self.tp)


class ColumnParallelLinear(nn.Module):
    """Outputs split: weight [*local outputs, inputs], bias [*local outputs]; the product is over flattened outputs.

    `outputs` is the logical shape, `split` says how it is cut. The input is the same on all ranks, with sequence
    parallelism each rank's part of the sequence. `before_activation`: an element-wise function follows.
    """

    def __init__(
        self,
        outputs: tuple[int, ...],
        inputs: int,
        split: Split,
        place: TpContext,
        *,
        bias: bool,
        before_activation: bool = False,
    ) -> None:
        super().__init__()
        self.place, self.before_activation = place, before_activation
        self.local_outputs = place.local_shape(outputs, split)
        self.weight = place.parameter(*self.local_outputs, inputs)
        self.bias = place.parameter(*self.local_outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., prod(local outputs)]; with sequence parallelism [s/t, ..., inputs] -> [s, ...]."""
        return linear(
            x,
            self.weight.flatten(0, -2),
            None if self.bias is None else with_main_grad(self.bias).flatten(),
            group=self.place.tp,
            sequence_parallel=self.place.sequence is not None,
            main_grad=main_grad_of(self.weight),
            deferred=self.place.deferred,
            fp8=self.place.fp8,
            before_activation=self.before_activation,
        )


class RowParallelLinear(nn.Module):
    """Inputs split: weight [outputs, inputs/t], bias [outputs]; the products of the ranks are summed.

    The input is this rank's part of the last dim. The output is the same on all ranks, with sequence parallelism this
    rank's part of the sequence. The bias is added once, after the sum.
    """

    def __init__(self, outputs: int, inputs: int, place: TpContext, *, bias: bool) -> None:
        super().__init__()
        self.place = place
        self.weight = place.parameter(*place.local_shape((outputs, inputs), Split(1)))
        self.bias = place.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs/t] -> [..., outputs], with sequence parallelism [s, ..., inputs/t] -> [s/t, ..., outputs]."""
        whole = self.place.tp is None
        bias = None if self.bias is None else with_main_grad(self.bias)
        added, place, main_grad = bias if whole else None, self.place, main_grad_of(self.weight)
        y = linear(x, self.weight, added, main_grad=main_grad, deferred=place.deferred, fp8=place.fp8)
        if whole:
            return y
        y = self.place.sum(y)
        return y if bias is None else y + bias


class VocabParallelEmbedding(nn.Module):
    """Rows split: weight [rows of this rank, width]; rank i of t has the rows [i * rows // t, (i + 1) * rows // t).

    Each rank looks up the tokens whose rows it has and contributes zeros for the others, which get no gradient here.
    """

    def __init__(self, rows: int, width: int, place: TpContext) -> None:
        super().__init__()
        self.place = place
        size, index = (1, 0) if place.tp is None else (place.tp.size, place.tp.index)
        self.first_row = index * rows // size
        self.weight = place.parameter(*place.local_shape((rows, width), ROWS))

    def forward(self, tokens: Tensor) -> Tensor:
        """[s, b] -> [s, b, width], with sequence parallelism this rank's part [s/t, b, width]."""
        if self.place.tp is None:
            return embed(tokens, self.weight, main_grad_of(self.weight))
        rows = len(self.weight)
        row = tokens - self.first_row
        foreign = (row < 0) | (row >= rows)
        x = embed(row.clamp(0, rows - 1), self.weight, main_grad_of(self.weight))
        return self.place.sum(x.masked_fill(foreign.unsqueeze(-1), 0.0))
