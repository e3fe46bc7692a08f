"""All parameters in one flat buffer, all gradients in another.

The layout of the buffers is data: which parameter sits at which offset is a pure function of the parameter records.
Parameters that weight decay touches come first, so that one optimizer call covers each of the two ranges. Parameters of
the model become views of the flat buffer; gradients of every microbatch are added up in fp32 (fp64 in fp64) in a flat
buffer of the same layout, through one hook per parameter. There is no second persistent copy of either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.parallel.parameters import ParameterRecord

ALIGNMENT = 64  # elements: 256 bytes of fp32, so that every parameter starts on a full vector and cache line


@dataclass(frozen=True)
class BufferSlot:
    """Elements [start, start + record.numel) of a flat buffer: one parameter."""

    record: ParameterRecord
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.record.numel

    def view(self, buffer: Tensor) -> Tensor:
        """The parameter's shape over its part of `buffer` ([size])."""
        return buffer[self.start : self.stop].view(self.record.shape)


@dataclass(frozen=True)
class BufferLayout:
    """Where every parameter lies. Elements [0, decay_stop) are decayed, [decay_stop, size) are not."""

    slots: tuple[BufferSlot, ...]
    decay_stop: int
    size: int


def buffer_layout(records: Sequence[ParameterRecord]) -> BufferLayout:
    """Decayed parameters, then the others; each in reverse order of `records`, as backward reaches them."""
    slots = []
    cursor = decay_stop = 0
    for decay in (True, False):
        for record in reversed(records):
            if record.decay == decay:
                slots.append(BufferSlot(record, cursor))
                cursor += -(-record.numel // ALIGNMENT) * ALIGNMENT
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
        self._stale: set[str] = set()  # slots whose gradients are still those of the step before
        self._sunk: set[str] = set()  # slots that the model's own backward fills

    def attach(self, model: nn.Module, *, sunk: Iterable[str] = ()) -> dict[str, Tensor]:
        """Make the model's parameters views of the flat buffer and add up their gradients in the other.

        The gradients of parameters named in `sunk` are accumulated by the model itself; the returned tensors, by name,
        are where to.
        """
        self._sunk = set(sunk)
        parameters = dict(model.named_parameters())
        names = [slot.record.name for slot in self.layout.slots]
        assert sorted(parameters) == sorted(names), set(parameters) ^ set(names)
        for slot in self.layout.slots:
            parameter = parameters[slot.record.name]
            assert tuple(parameter.shape) == slot.record.shape, (slot.record, parameter.shape)
            parameter.data = slot.view(self.parameters)
            if slot.record.name not in self._sunk:
                self._add_up(parameter, slot.record.name, slot.view(self.gradients))
        return {
            slot.record.name: slot.view(self.gradients) for slot in self.layout.slots if slot.record.name in self._sunk
        }

    def _add_up(self, parameter: nn.Parameter, name: str, total: Tensor) -> None:
        def accumulate(ready: Tensor) -> None:
            assert ready.grad is not None
            if name in self._stale:  # the step's first microbatch overwrites: cheaper than zeroing and adding
                total.copy_(ready.grad)
                self._stale.discard(name)
            elif ready.grad.dtype == total.dtype:
                total.add_(ready.grad)
            else:
                total.add_(ready.grad.to(total.dtype))  # a mixed-dtype add is several times slower on CPUs
            ready.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for slot in self.layout.slots:
            if slot.record.name in self._sunk:
                slot.view(self.gradients).zero_()
            else:
                self._stale.add(slot.record.name)

    def finish_step(self) -> None:
        """After the last microbatch's backward: parameters that took no part have gradient zero."""
        for slot in self.layout.slots:
            if slot.record.name in self._stale:
                slot.view(self.gradients).zero_()
        self._stale.clear()

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set masters and parameters to `values`, (name, tensor of the logical shape) pairs."""
        slots = {slot.record.name: slot for slot in self.layout.slots}
        for name, value in values:
            slots[name].view(self.masters).copy_(value)
        self.round_masters()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Parameters become the masters, rounded to the model's dtype."""
        if self.parameters is not self.masters:
            self.parameters.copy_(self.masters)
