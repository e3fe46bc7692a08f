"""Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) for the matrices of blocks, AdamW for all else.

A step of a matrix W with r rows and c columns, whose gradient G is divided and clipped:

    M <- momentum M + (1 - momentum) G
    U = momentum M + (1 - momentum) G with nesterov, else M
    W <- (1 - rate weight_decay) W - rate scale(r, c) orthogonalised(U)

Orthogonalised are q, k and v (or each head), gate and up, and each expert's matrices, each for itself and whole. So a
matrix has one owner among its data-parallel ranks (ownership=whole in layout/buffer_layout.py), and where others hold
parts of it, one rank computes with the whole (matrix_stacks.py). A step that is skipped changes nothing, and a matrix
of an expert that had no token in the step is left alone: momentum would move it on at full speed, however old it is.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.launch.device import slow_precision
from megalite.layout.buffer_layout import Kind
from megalite.layout.matrices import owned_matrices
from megalite.model.scaling import SCALES
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffers import TrainingBuffers, dtype_of
from megalite.optim.groups import UpdateRule
from megalite.optim.matrix_stacks import Homes, Stack, sharers, stacks_of
from megalite.optim.newton_schulz import orthogonalised, polynomials
from megalite.optim.rank_buffers import KINDS, STACK


class Muon:
    """The optimizer (optimizer.py) of `buffers`; `rest` updates what lies in no bucket of matrices. `rules`: the
    rate and decay of each parameter."""

    rounds = False

    def __init__(
        self,
        buffers: TrainingBuffers,
        config: Config,
        context: ParallelContext,
        rest: FlatAdamW,
        rules: Mapping[str, UpdateRule],
    ) -> None:
        muon, buckets, device = config.optimizer.muon, buffers.layout.buckets, buffers.device
        sizes = [len(own) if bucket.whole else 0 for own, bucket in zip(buffers.masters, buckets, strict=True)]
        self.momentum = list(torch.zeros(sum(sizes), dtype=buffers.master_dtype, device=device).split(sizes))
        self.before_change: Callable[[], None] = lambda: None
        self._rest, self._settings, self._table = rest, muon, polynomials(muon.coefficients, muon.steps)
        dtype = muon.dtype or ("fp32" if context.dtype == torch.float32 else "bf16")
        self._master_dtype, self._dtype = buffers.master_dtype, dtype_of(dtype, buffers.master_dtype)
        emulated = muon.dtype is None and slow_precision(self._dtype, context.device)
        self._products = torch.float32 if emulated else self._dtype
        self._kinds = list[tuple[Kind, list[Stack], Homes]]()
        for kind in KINDS:
            if matrices := owned_matrices(buffers.layout, kind, buffers.index[kind]):
                ranks = sharers(context, kind)
                stacks = stacks_of(buffers, self.momentum, matrices, rules, ranks=ranks, most=STACK[device.type])
                self._kinds.append((kind, stacks, Homes(stacks, context, kind)))

    def state(self) -> Mapping[str, list[Tensor] | Tensor]:
        return {"momentum": self.momentum, **self._rest.state()}

    @torch.no_grad()
    def step(self, lr: Tensor, *, divisor: Tensor, skip: Tensor, decay_factor: float = 1.0) -> None:
        self.before_change()
        self._rest.step(lr, divisor=divisor, skip=skip, decay_factor=decay_factor)
        for kind, stacks, homes in self._kinds:
            counts = [len(stack.matrices) for stack in stacks]
            moves = (skip == 0).expand(sum(counts))
            if kind == "expert":
                moves = moves & homes.any(torch.cat([each.any(1) for stack in stacks for each in stack.gradients]))
            of_stacks = list(zip(stacks, moves.split(counts), strict=True))
            parts = (self._direction(stack, divisor, moving) for stack, moving in of_stacks)
            updates = homes.at_home(parts, self._orthogonalised)
            for (stack, moving), update in zip(of_stacks, updates, strict=True):
                rates = (lr * stack.factors * moving)[:, None]
                kept = 1.0 - rates * (stack.decays[:, None] * decay_factor)
                kept, rates = (each.to(self._master_dtype) for each in (kept, rates))
                moved = update.to(self._master_dtype).mul_(rates)
                for master, share, part in zip(stack.masters, *map(stack.split, (kept, moved)), strict=True):
                    master.mul_(share).sub_(part)

    def _direction(self, stack: Stack, divisor: Tensor, moving: Tensor) -> Tensor:
        """U of each matrix [matrices, elements], whose momentum takes the gradient in; of one that is not `moving`, any
        finite numbers."""
        gradient, share = torch.cat(stack.gradients).to(self._master_dtype), self._settings.momentum
        gradient.div_(divisor).masked_fill_(~moving[:, None], 0.0)
        weights = (moving.to(self._master_dtype) * (1.0 - share))[:, None]
        for momentum, part, weight in zip(stack.momenta, *map(stack.split, (gradient, weights)), strict=True):
            momentum.lerp_(part, weight)
        kept = torch.cat(stack.momenta)
        return (gradient.lerp_(kept, share) if self._settings.nesterov else kept).to(self._dtype)

    def _orthogonalised(self, stack: Stack, whole: Tensor) -> Tensor:
        """The updates of `whole`, the U of matrices [k, *shape]: orthogonalised and scaled."""
        if not stack.heads:
            return self._scaled(whole.flatten(1, -2)).view(whole.shape)
        if self._settings.qkv == "head":
            return self._scaled(whole.flatten(0, 2)).view(whole.shape)
        k, groups, _, size, columns = whole.shape
        queries, keys_values = whole[:, :, :-2].flatten(1, 3), whole[:, :, -2:].transpose(1, 2).flatten(2, 3)
        queries, keys_values = self._scaled(queries), self._scaled(keys_values.flatten(0, 1))
        keys_values = keys_values.view(k, 2, groups, size, columns).transpose(1, 2)
        return torch.cat([queries.unflatten(1, (groups, -1, size)), keys_values], dim=2)

    def _scaled(self, u: Tensor) -> Tensor:
        """[k, r, c], each matrix orthogonalised and scaled."""
        _, rows, columns = u.shape
        found = orthogonalised(u.to(self._products), self._table)
        return found.mul_(SCALES[self._settings.scale](rows, columns, self._settings.rms)).to(u.dtype)
