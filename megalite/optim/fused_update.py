"""AdamW's update of a rank's slice of a bucket as one compiled kernel, which reads and writes every number once.

torch's fused kernel also writes back the divided gradients, and masters are read again when they are rounded: with fp32
gradients and moments and bf16 parameters 38 bytes per parameter, here 30. Narrow gradients and moments need no copy.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from megalite.layout.buffer_layout import ALIGNMENT, SliceRange

Groups = Sequence[tuple[Sequence[SliceRange], float]]  # runs and their weight decay


class FusedUpdate:
    """Updates `masters` and both moments from the gradients, and rounds masters into `parameters`: lists of one flat
    tensor per bucket, of ALIGNMENT elements or a multiple. Runs of `groups` begin at such a multiple."""

    def __init__(
        self,
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        parameters: Sequence[Tensor],
        groups: Groups,
    ) -> None:
        self._dtype = masters[0].dtype if masters else torch.float32
        self._slices: list[tuple[Tensor | None, ...]] = []
        for bucket, (master, *others, parameter) in enumerate(
            zip(masters, gradients, exp_avg, exp_avg_sq, parameters, strict=True)
        ):
            rows = [tensor.view(-1, ALIGNMENT) for tensor in (master, *others)]
            rounded = None if parameter is master else parameter.view(-1, ALIGNMENT)
            self._slices.append((*rows, rounded, _decay(bucket, rows[0], groups)))

    def step(
        self, count: Tensor, lr: Tensor, scale: Tensor, skip: Tensor, betas: tuple[float, float], eps: float
    ) -> None:
        """Step number `count` with the gradients divided by `scale`; where `skip` is 1 nothing changes. All are 0-d."""
        first, second = betas
        steps = count.double()
        step_size, root = lr / (1.0 - first**steps), (1.0 - second**steps).rsqrt()
        numbers = torch.stack([lr.double(), step_size, root, scale.double(), skip.double()])
        numbers = numbers.to(self._dtype)  # [5]: kernels read numbers of their own dtype
        for tensors in self._slices:
            _compiled(_update)(*tensors, numbers, first, second, eps)


def _decay(bucket: int, rows: Tensor, groups: Groups) -> Tensor:
    """The weight decay of each row of ALIGNMENT elements, [rows, 1]. What lies in no run is padding: it has none."""
    decay = torch.zeros(len(rows), 1, dtype=rows.dtype)
    for runs, weight_decay in groups:
        for run in runs:
            if run.bucket == bucket:
                assert run.start % ALIGNMENT == 0, run
                decay[run.start // ALIGNMENT : -(-run.stop // ALIGNMENT)] = weight_decay
    return decay.to(rows.device)


@cache
def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    """For slices of any size."""
    return torch.compile(update, fullgraph=True, dynamic=True)


def _update(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parameter: Tensor | None,
    decay: Tensor,
    numbers: Tensor,
    first: float,
    second: float,
    eps: float,
) -> None:
    """[rows, ALIGNMENT] each, decay [rows, 1], numbers [5] as unpacked here: step_size = lr / (1 - first^t) and root =
    1 / sqrt(1 - second^t)."""
    lr, step_size, root, scale, skip = numbers.unbind()
    applied = skip == 0
    divided = gradient.to(master.dtype) / scale
    mean = first * exp_avg.to(master.dtype) + (1.0 - first) * divided
    square = second * exp_avg_sq + (1.0 - second) * divided * divided
    updated = master * (1.0 - lr * decay) - step_size * mean / (square.sqrt() * root + eps)
    updated = torch.where(applied, updated, master)
    exp_avg.copy_(torch.where(applied, mean.to(exp_avg.dtype), exp_avg))
    exp_avg_sq.copy_(torch.where(applied, square, exp_avg_sq))
    if parameter is not None:
        parameter.copy_(updated)
    master.copy_(updated)
