"""Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) for the matrices of blocks, AdamW for all else.

A step of a matrix W with r rows and c columns, whose gradient G is divided and clipped:

    M <- momentum M + (1 - momentum) G
    U = momentum M + (1 - momentum) G with nesterov, else M
    W <- (1 - rate weight_decay) W - rate scale(r, c) orthogonalised(U)

Orthogonalised are q, k and v (or each head), gate and up, and each expert's matrices, each for itself and whole. So a
matrix has one owner among its data-parallel ranks (ownership=whole in layout/buffer_layout.py). Ranks of tp (of
experts, etp) that own parts of the same matrices send them to one of them, the home of each matrix, and get their
parts of the result back: two all-to-alls a step. A step that is skipped changes nothing, and a matrix of an expert that
had no token in the step is left alone: momentum would move it on at full speed, however old it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind
from megalite.layout.parameters import Shard, ShardBox, shard_of
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffers import TrainingBuffers, dtype_of
from megalite.optim.groups import update_rules
from megalite.optim.newton_schulz import orthogonalised, polynomials
from megalite.optim.rank_buffers import KINDS
from megalite.tensor_parallel.collectives import TensorGroup, finish, start_all_gather, start_all_to_all

SCALES: dict[str, Callable[[int, int, float], float]] = {
    "match_adamw": lambda rows, columns, rms: rms * sqrt(max(rows, columns)),
    "max_ratio": lambda rows, columns, _: sqrt(max(1.0, rows / columns)),
    "ratio": lambda rows, columns, _: sqrt(rows / columns),
}


@dataclass(frozen=True)
class Block:
    """What this rank owns of one entry of a stack of matrices: flat views of its masters, gradients and momentum.

    `shape` is that of the whole entry, [..., r, c]; `shards` says what of it each rank of the axis holds. With `heads`
    it is [groups, queries + 2, head size, c]: the queries, the key and the value of each group.
    """

    master: Tensor
    gradient: Tensor
    momentum: Tensor
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    heads: bool
    name: str

    @property
    def cost(self) -> int:
        """Roughly proportional to the products of an orthogonalisation."""
        rows, columns = prod(self.shape[:-1]), self.shape[-1]
        return rows * columns * min(rows, columns)

    def gather(self, of_ranks: Tensor) -> Tensor:
        """The whole entry, from what each rank of the axis holds of it, [ranks, elements]. What several hold enters
        once."""
        whole = of_ranks.new_empty(self.shape)
        for part, box in self._boxes(of_ranks):
            if box.counted:
                whole[box.logical] = part
        return whole

    def scatter(self, whole: Tensor, of_ranks: Tensor) -> None:
        """Write into `of_ranks` [ranks, elements] what each rank holds of `whole`."""
        for part, box in self._boxes(of_ranks):
            part.copy_(whole[box.logical])

    def _boxes(self, of_ranks: Tensor) -> Iterator[tuple[Tensor, ShardBox]]:
        for flat, shard in zip(of_ranks, self.shards, strict=True):
            yield from ((flat.view(shard.shape)[box.local], box) for box in shard.boxes)


@dataclass(frozen=True)
class Homes:
    """The ranks of tp (of experts, etp) that hold parts of the same matrices, and which of them is this rank.

    `places`: where in `group` they are, in their order. The defaults are a rank alone.
    """

    places: tuple[int, ...] = (0,)
    index: int = 0
    group: TensorGroup | None = None

    @classmethod
    def of(cls, context: ParallelContext, kind: Kind) -> "Homes":
        name, axis = ("tp", "tp") if kind == "dense" else ("etp-ep", "etp")
        group, at = TensorGroup.of(context.group(name)), context.coordinates
        if group is None or context.size(axis) == 1:
            return cls()
        members = [context.layout.coordinates(rank) for rank in context.members(name)]
        places = tuple(place for place, one in enumerate(members) if kind == "dense" or one["ep"] == at["ep"])
        return cls(places, at[axis], group)

    def any(self, flags: Tensor) -> Tensor:
        """Which of `flags` [n], bool, are set on one of the ranks."""
        if self.group is None:
            return flags
        of_members = finish(start_all_gather(flags.to(torch.uint8), self.group)).view(self.group.size, -1)
        return of_members[list(self.places)].bool().any(0)

    def at_home(
        self, blocks: Sequence[Block], parts: Sequence[Tensor], compute: Callable[[Block, Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """This rank's part of `compute(block, whole)` for each block, of whose whole each rank gives its (flat) part.
        One of the ranks, the home of the block, computes it. Collective."""
        if self.group is None:
            return [compute(block, part.view(block.shape)).flatten() for block, part in zip(blocks, parts, strict=True)]
        homes = homes_of(blocks, len(self.places))
        order = sorted(range(len(blocks)), key=homes.__getitem__)
        own = [at for at in order if homes[at] == self.index]
        sends, receives = [0] * self.group.size, [0] * self.group.size
        for index, place in enumerate(self.places):
            sends[place] = sum(len(parts[at]) for at in order if homes[at] == index)
            receives[place] = sum(len(parts[at]) for at in own)
        arrived = finish(start_all_to_all(torch.cat([parts[at] for at in order]), sends, receives, self.group))
        of_blocks = arrived.view(len(self.places), -1).split([len(parts[at]) for at in own], dim=1)
        for block, of_ranks in zip([blocks[at] for at in own], of_blocks, strict=True):
            block.scatter(compute(block, block.gather(of_ranks)), of_ranks)
        sizes = [len(parts[at]) for at in order]
        returned = finish(start_all_to_all(arrived, receives, sends, self.group)).split(sizes)
        return [part for _, part in sorted(zip(order, returned, strict=True), key=lambda pair: pair[0])]


def homes_of(blocks: Sequence[Block], ranks: int) -> list[int]:
    """The rank, of so many, that computes each block: the dearest first, each by the rank with the least to do."""
    load, homes = [0] * ranks, [0] * len(blocks)
    for at in sorted(range(len(blocks)), key=lambda at: -blocks[at].cost):
        homes[at] = load.index(min(load))
        load[homes[at]] += blocks[at].cost
    return homes


class Muon:
    """The optimizer (optimizer.py) of `buffers`; `rest` updates what lies in no bucket of matrices."""

    rounds = False

    def __init__(self, buffers: TrainingBuffers, config: Config, context: ParallelContext, rest: FlatAdamW) -> None:
        muon, buckets = config.optimizer.muon, buffers.layout.buckets
        sizes = [len(own) if bucket.whole else 0 for own, bucket in zip(buffers.masters, buckets, strict=True)]
        self.momentum = list(torch.zeros(sum(sizes), dtype=buffers.master_dtype, device=buffers.device).split(sizes))
        self.before_change: Callable[[], None] = lambda: None
        self._rest, self._settings, self._table = rest, muon, polynomials(muon.coefficients, muon.steps)
        dtype = muon.dtype or ("fp32" if context.dtype == torch.float32 else "bf16")
        self._master_dtype, self._dtype = buffers.master_dtype, dtype_of(dtype, buffers.master_dtype)
        self._rules = update_rules((slot.record for slot, _ in buffers.places.values()), config)
        self._parts = list[tuple[Kind, Homes, list[Block], Tensor]]()
        for kind in KINDS:
            homes = Homes.of(context, kind)
            blocks = list(blocks_of(buffers, self.momentum, kind, len(homes.places)))
            factors = [self._rules[block.name].factor for block in blocks]
            self._parts += (
                [(kind, homes, blocks, torch.tensor(factors, dtype=torch.float64, device=buffers.device))]
                if blocks
                else []
            )

    def state(self) -> Mapping[str, list[Tensor] | Tensor]:
        return {"momentum": self.momentum, **self._rest.state()}

    @torch.no_grad()
    def step(self, lr: Tensor, *, divisor: Tensor, skip: Tensor, decay_factor: float = 1.0) -> None:
        self.before_change()
        self._rest.step(lr, divisor=divisor, skip=skip, decay_factor=decay_factor)
        for kind, homes, blocks, factors in self._parts:
            moves = (skip == 0).expand(len(blocks))
            if kind == "expert":
                moves = moves & homes.any(torch.stack([block.gradient.any() for block in blocks]))
            rates = ((lr * factors).to(self._master_dtype) * moves).unbind()
            directions = [
                self._direction(block, divisor, one) for block, one in zip(blocks, moves.unbind(), strict=True)
            ]
            updates = homes.at_home(blocks, directions, self._orthogonalised)
            for block, update, one in zip(blocks, updates, rates, strict=True):
                kept = 1.0 - one * (self._rules[block.name].decay * decay_factor)
                block.master.mul_(kept).sub_(update.to(self._master_dtype) * one)

    def _direction(self, block: Block, divisor: Tensor, moves: Tensor) -> Tensor:
        """U of a block, whose momentum takes the gradient in; of one that does not move, any finite numbers."""
        gradient, momentum = block.gradient.to(self._master_dtype), self._settings.momentum
        gradient = gradient.div_(divisor).masked_fill_(~moves, 0.0)
        block.momentum.lerp_(gradient, moves.to(self._master_dtype) * (1.0 - momentum))
        return (gradient.lerp_(block.momentum, momentum) if self._settings.nesterov else block.momentum).to(self._dtype)

    def _orthogonalised(self, block: Block, whole: Tensor) -> Tensor:
        """The update of `whole`, the U of all of a block: its matrices orthogonalised and scaled."""
        if not block.heads:
            parts = [whole.flatten(0, -2)]
        elif self._settings.qkv == "head":
            parts = [whole.flatten(0, 1)]
        else:
            parts = [part.flatten(0, 2) for part in (whole[:, :-2], whole[:, -2:-1], whole[:, -1:])]
        scale, rms = SCALES[self._settings.scale], self._settings.rms
        found = [orthogonalised(part, self._table) * scale(part.shape[-2], part.shape[-1], rms) for part in parts]
        if len(found) == 1:
            return found[0].view(block.shape)
        return torch.cat([part.unflatten(0, (block.shape[0], -1, block.shape[2])) for part in found], dim=1)


def blocks_of(buffers: TrainingBuffers, momentum: Sequence[Tensor], kind: Kind, ranks: int) -> Iterator[Block]:
    """The blocks that this rank owns, in one order on all `ranks` that hold parts of them."""
    lists = zip(buffers.layout.buckets, buffers.masters, buffers.gradients, momentum, strict=True)
    for bucket, master, gradient, kept in (each for each in lists if each[0].whole and each[0].kind == kind):
        first = bucket.slice_size * buffers.index[kind]
        for slot in bucket.slots:
            record, stacked = slot.record, slot.record.stacked
            assert stacked is not None
            split = None if record.split is None else replace(record.split, dim=record.split.dim - stacked)
            shape, size = record.shape[stacked:], prod(slot.shard.shape[stacked:])
            shards = tuple(shard_of(shape, split, ranks, index) for index in range(ranks))
            for start in range(slot.start - first, slot.stop - first, size):
                if 0 <= start < bucket.slice_size:
                    own = slice(start, start + size)
                    yield Block(master[own], gradient[own], kept[own], shape, shards, record.heads, record.name)
