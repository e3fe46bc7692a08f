"""The matrices that a rank owns, stacked by shape, and the exchange that makes them whole.

Matrices of one shape are updated together, as many as fit into a bound on what that takes. Ranks of tp (of experts,
etp) that own parts of the same matrices send them to one of them, the home of each matrix, and get their parts of what
it computes back: two all-to-alls a step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind
from megalite.layout.matrices import OwnedMatrix, homes_of
from megalite.layout.parameters import Shard, ShardBox
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.groups import UpdateRule
from megalite.tensor_parallel.collectives import TensorGroup, finish, start_all_gather, start_all_to_all

# The group of the ranks that hold parts of a matrix, and the axis along which they do.
AXES: dict[Kind, tuple[str, str]] = {"dense": ("tp", "tp"), "expert": ("etp-ep", "etp")}


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape: views of the rank's masters, gradients and momentum, [k, elements] for each k that lie
    side by side; `shards` says what of a matrix each rank of the axis holds."""

    matrices: Sequence[OwnedMatrix]
    shards: tuple[Shard, ...]
    masters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]
    factors: Tensor  # of the learning rate, [matrices] fp64
    decays: Tensor  # [matrices] fp64

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a whole matrix, [r, c]; with `heads` [groups, queries + 2, head size, c]: the queries, the key
        and the value of each group."""
        return self.matrices[0].shape

    @property
    def heads(self) -> bool:
        return self.matrices[0].record.heads

    @property
    def part(self) -> int:
        """The elements that a rank has of a matrix."""
        return prod(self.shards[0].shape)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """[matrices, ...] as the parts that lie side by side."""
        return torch.split(x, [len(each) for each in self.masters])

    def gather(self, of_ranks: Tensor) -> Tensor:
        """Whole matrices [k, *shape], from what each rank of the axis holds of them, [ranks, k, elements]. What several
        hold enters once."""
        whole = of_ranks.new_empty(of_ranks.shape[1], *self.shape)
        for part, box in self._boxes(of_ranks):
            if box.counted:
                whole[:, *box.logical] = part
        return whole

    def scatter(self, whole: Tensor, of_ranks: Tensor) -> None:
        """Write into `of_ranks` [ranks, k, elements] what each rank holds of `whole` [k, *shape]."""
        for part, box in self._boxes(of_ranks):
            part.copy_(whole[:, *box.logical])

    def _boxes(self, of_ranks: Tensor) -> Iterator[tuple[Tensor, ShardBox]]:
        for parts, shard in zip(of_ranks, self.shards, strict=True):
            yield from ((parts.unflatten(1, shard.shape)[:, *box.local], box) for box in shard.boxes)


class Homes:
    """The ranks that hold parts of the matrices of `stacks`, and which of them computes with each. The rank may be the
    only one."""

    def __init__(self, stacks: Sequence[Stack], context: ParallelContext, kind: Kind) -> None:
        name, axis = AXES[kind]
        self._stacks, self._group = stacks, TensorGroup.of(context.group(name)) if sharers(context, kind) > 1 else None
        if self._group is None:
            return
        matrices, own = [each for stack in stacks for each in stack.matrices], context.coordinates
        members = [context.layout.coordinates(rank) for rank in context.members(name)]
        # Where in the group they are, in their order: the group of experts has the ranks of ep, too.
        self._places = [place for place, one in enumerate(members) if kind == "dense" or one["ep"] == own["ep"]]
        homes, sizes = homes_of(matrices, len(self._places)), [each.stop - each.start for each in matrices]
        self._order = sorted(range(len(homes)), key=homes.__getitem__)  # in which matrices travel
        self._sizes = [sizes[at] for at in self._order]
        self._sends, self._receives = [0] * len(members), [0] * len(members)
        for rank, place in enumerate(self._places):
            self._sends[place] = sum(size for size, home in zip(sizes, homes, strict=True) if home == rank)
            self._receives[place] = sum(size for size, home in zip(sizes, homes, strict=True) if home == own[axis])
        ends = [0, *accumulate(len(stack.matrices) for stack in stacks)]
        self._computed = [homes[start:stop].count(own[axis]) for start, stop in pairwise(ends)]  # of each stack

    def any(self, flags: Tensor) -> Tensor:
        """Which of `flags` [n], bool, are set on one of the ranks. Collective."""
        if self._group is None:
            return flags
        of_members = finish(start_all_gather(flags.to(torch.uint8), self._group)).view(self._group.size, -1)
        return of_members[self._places].bool().any(0)

    def at_home(self, parts: Iterable[Tensor], compute: Callable[[Stack, Tensor], Tensor]) -> Iterator[Tensor]:
        """For each stack this rank's part [matrices, elements] of `compute(stack, whole)`, from `parts` of that form;
        `whole` is [k, *shape]. One rank computes each matrix. Alone, a stack is taken when it is asked for. Collective.
        """
        if self._group is None:
            for stack, part in zip(self._stacks, parts, strict=True):
                yield compute(stack, part.unflatten(1, stack.shape)).flatten(1)
            return
        of_matrices = [one for part in parts for one in part]
        leaving = torch.cat([of_matrices[at] for at in self._order])
        of_matrices.clear()
        arrived = finish(start_all_to_all(leaving, self._sends, self._receives, self._group))
        del leaving
        counts = list(zip(self._stacks, self._computed, strict=True))
        of_stacks = arrived.view(len(self._places), -1).split([count * stack.part for stack, count in counts], dim=1)
        for (stack, count), of_ranks in zip(counts, of_stacks, strict=True):
            if count:
                of_ranks = of_ranks.unflatten(1, (count, stack.part))
                stack.scatter(compute(stack, stack.gather(of_ranks)), of_ranks)
        returned = finish(start_all_to_all(arrived, self._receives, self._sends, self._group)).split(self._sizes)
        del arrived
        ordered = iter(part for _, part in sorted(zip(self._order, returned, strict=True), key=lambda pair: pair[0]))
        for stack in self._stacks:
            yield torch.stack([next(ordered) for _ in stack.matrices])


def sharers(context: ParallelContext, kind: Kind) -> int:
    """How many ranks hold parts of one matrix."""
    name, axis = AXES[kind]
    return 1 if context.group(name) is None else context.size(axis)


def stacks_of(
    buffers: TrainingBuffers,
    momentum: Sequence[Tensor],
    matrices: Iterable[OwnedMatrix],
    rules: Mapping[str, UpdateRule],
    *,
    ranks: int,
    most: int,
) -> list[Stack]:
    """The matrices of a rank in stacks of up to `most` elements, or of one matrix, in one order on all `ranks` that
    hold parts of them."""
    alike = dict[tuple[object, ...], list[OwnedMatrix]]()
    for each in matrices:
        alike.setdefault((each.shape, each.shards(ranks), each.record.heads), []).append(each)
    stacks = []
    for members in alike.values():
        size = max(1, most // prod(members[0].shape))
        for some in (members[at : at + size] for at in range(0, len(members), size)):
            masters, gradients, momenta = (
                _views(each, some) for each in (buffers.masters, buffers.gradients, momentum)
            )
            of_each = torch.tensor(
                [rules[each.record.name] for each in some], dtype=torch.float64, device=buffers.device
            )
            factors, decays, _ = of_each.unbind(1)
            stacks.append(Stack(some, some[0].shards(ranks), masters, gradients, momenta, factors, decays))
    return stacks


def _views(slices: Sequence[Tensor], matrices: Sequence[OwnedMatrix]) -> tuple[Tensor, ...]:
    """The matrices in a rank's slices, [k, elements] for each k that lie side by side."""
    runs = list[list[OwnedMatrix]]()
    for each in matrices:
        if runs and (runs[-1][-1].bucket, runs[-1][-1].stop) == (each.bucket, each.start):
            runs[-1].append(each)
        else:
            runs.append([each])
    return tuple(slices[run[0].bucket][run[0].start : run[-1].stop].view(len(run), -1) for run in runs)
