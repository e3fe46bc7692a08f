"""All parameters in one flat buffer, all gradients in another.

The layout of the buffers is data: which shard of which parameter sits at which offset is a pure function of the
parameter records and this rank's place on the tensor-parallel axis. Parameters that weight decay touches come first, so
that one optimizer call covers each of the two ranges; in each, those that tp splits come before those it replicates, so
that the latter are one range, which one rank counts and all of them sum. Parameters of the model become views of the
flat buffer; gradients of all microbatches are added up in fp32 (fp64 in fp64) in a flat buffer of the same layout, by
the model's own backward or by one hook per parameter. There is no second persistent copy of either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from megalite.parallel.parameters import ParameterRecord, Shard, shard

ALIGNMENT = 64  # elements: 256 bytes of fp32, so that every parameter starts on a full vector and cache line


@dataclass(frozen=True)
class BufferSlot:
    """Elements [start, stop) of a flat buffer: what this rank holds of one parameter."""

    record: ParameterRecord
    shard: Shard
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shard.shape)

    def view(self, buffer: Tensor) -> Tensor:
        """The shard's shape over its part of `buffer` ([size])."""
        return buffer[self.start : self.stop].view(self.shard.shape)


@dataclass(frozen=True)
class BufferLayout:
    """Where every parameter lies. Elements [0, decay_stop) are decayed, [decay_stop, size) are not."""

    slots: tuple[BufferSlot, ...]
    decay_stop: int
    size: int

    def counted(self, buffer: Tensor) -> list[Tensor]:
        """The parts of `buffer` that this rank counts in a norm, as few as possible: of replicas one rank's only.

        Gaps between slots are zero and may be part of them.
        """
        parts: list[Tensor] = []
        start: int | None = None  # of a run of slots that are counted whole
        for slot in self.slots:
            whole = all(box.counted for box in slot.shard.boxes)
            if whole and start is None:
                start = slot.start
            elif not whole:
                if start is not None:
                    parts.append(buffer[start : slot.start])
                    start = None
                parts += [slot.view(buffer)[box.local] for box in slot.shard.boxes if box.counted]
        return parts if start is None else [*parts, buffer[start:]]

    def replicated(self, buffer: Tensor) -> list[Tensor]:
        """The parameters in `buffer` that tp does not split, alike on all its ranks: a range of decayed, one of others.

        What ranks hold alike of split ones is in `shared_tails`.
        """
        ranges = []
        for decay in (True, False):
            slots = [slot for slot in self.slots if slot.record.split is None and slot.record.decay == decay]
            ranges += [buffer[slots[0].start : slots[-1].stop]] if slots else []
        return ranges

    def shared_tails(self, buffer: Tensor) -> list[Tensor]:
        """Of the split parameters in `buffer`, the parts that this rank and its next neighbours on the tp axis hold
        alike (`Split.shared_tail`: key-value heads), as views that need not be contiguous."""
        return [
            slot.view(buffer)[box.local]
            for slot in self.slots
            for box in slot.shard.boxes
            if slot.record.split is not None and box.replicas > 1
        ]


def buffer_layout(records: Sequence[ParameterRecord], *, size: int = 1, index: int = 0) -> BufferLayout:
    """The buffers of rank `index` of `size` tensor-parallel ranks.

    Decayed parameters, then the others; in each, split ones, then replicated ones; those in reverse order of `records`,
    as backward reaches them.
    """
    slots = []
    cursor = decay_stop = 0
    for decay, split in product((True, False), (True, False)):
        for record in reversed(records):
            if (record.decay, record.split is not None) == (decay, split):
                slot = BufferSlot(record, shard(record, size, index), cursor)
                slots.append(slot)
                cursor += -(-(slot.stop - slot.start) // ALIGNMENT) * ALIGNMENT
        if decay:
            decay_stop = cursor
    return BufferLayout(tuple(slots), decay_stop, cursor)


class TrainingBuffers:
    """Flat parameters, masters and gradients of one model.

    `masters` ([size], fp32 or fp64) are what the optimizer updates; `parameters` ([size], the model's dtype) are what
    the model computes with, the very same tensor when the dtypes agree. `gradients` ([size]) has the masters' dtype.
    """

    def __init__(self, layout: BufferLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.layout = layout
        self.masters = torch.zeros(layout.size, dtype=master_dtype, device=device)
        self.gradients = torch.zeros(layout.size, dtype=master_dtype, device=device)
        self.parameters = self.masters if dtype == master_dtype else torch.zeros_like(self.masters, dtype=dtype)

    def attach(self, model: nn.Module, *, sunk: Iterable[str] = ()) -> dict[str, Tensor]:
        """Make the model's parameters views of the flat buffer and add up their gradients in the other.

        The gradients of parameters named in `sunk` are accumulated by the model itself; the returned tensors, by name,
        are where to.
        """
        own = set(sunk)
        parameters = dict(model.named_parameters())
        names = [slot.record.name for slot in self.layout.slots]
        assert sorted(parameters) == sorted(names), set(parameters) ^ set(names)
        for slot in self.layout.slots:
            parameter = parameters[slot.record.name]
            assert tuple(parameter.shape) == slot.shard.shape, (slot, parameter.shape)
            parameter.data = slot.view(self.parameters)
            if slot.record.name not in own:
                _add_up(parameter, slot.view(self.gradients))
        return {slot.record.name: slot.view(self.gradients) for slot in self.layout.slots if slot.record.name in own}

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        self.gradients.zero_()

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set masters and parameters to `values`: (name, tensor) pairs, the tensor logical or this rank's shard."""
        slots = {slot.record.name: slot for slot in self.layout.slots}
        for name, value in values:
            slot = slots[name]
            if value.shape == slot.shard.shape:
                slot.view(self.masters).copy_(value)
            else:
                assert value.shape == slot.record.shape, (slot, value.shape)
                for box in slot.shard.boxes:
                    slot.view(self.masters)[box.local] = value[box.logical].to(self.masters)
        self.round_masters()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Parameters become the masters, rounded to the model's dtype."""
        if self.parameters is not self.masters:
            self.parameters.copy_(self.masters)


def _add_up(parameter: nn.Parameter, total: Tensor) -> None:
    """Have each gradient of the parameter added to `total` and forgotten."""

    def accumulate(ready: Tensor) -> None:
        assert ready.grad is not None
        total.add_(ready.grad.to(total.dtype))  # a mixed-dtype add is several times slower on CPUs
        ready.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
