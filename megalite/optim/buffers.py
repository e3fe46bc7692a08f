"""Holds all parameters in contiguous buffers, all gradients in others of the same layout, and a rank's share of both.

Parameters of the model become views of the parameter buffers; gradients of all microbatches are added up in the
gradient buffers, by the model's own backward or by one hook per parameter. There is no second persistent copy of
either. Everything that a rank has a share of (masters, gradients once they are summed, moments) is a list of one flat
tensor per bucket: its slices.
"""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from megalite.layout.buffer_layout import BufferLayout, BufferSlot, OwnedRange, SliceRange


class TrainingBuffers:
    """Parameters, gradients and masters of one model on one rank.

    `parameter_buckets` and `gradient_buckets` ([bucket's size] each) are whole; `parameters`, `gradients` and `masters`
    ([bucket's size / shards] each) are the slices of the rank at position `dense` (`expert`) of those that share state.
    Masters are what the optimizer updates, in fp32 (fp64 in fp64): the very slices of the parameters where these have
    that dtype, else views of one flat tensor. Gradients have `gradient_dtype`, the masters' by default.
    """

    def __init__(
        self,
        layout: BufferLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        dense: int = 0,
        expert: int = 0,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.owned = layout.owned(dense, expert)
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = {"model": dtype, "master": self.master_dtype}
        summed_in = gradient_dtype or self.master_dtype
        stored = {
            name: torch.zeros(size, dtype=dtypes[name.precision], device=device) for name, size in layout.sizes.items()
        }
        summed = {name: torch.zeros(size, dtype=summed_in, device=device) for name, size in layout.sizes.items()}
        self._parameters, self._gradients = stored, summed
        self.parameter_buckets = [stored[bucket.buffer][bucket.start : bucket.stop] for bucket in layout.buckets]
        self.gradient_buckets = [summed[bucket.buffer][bucket.start : bucket.stop] for bucket in layout.buckets]
        index = {"dense": dense, "expert": expert}
        own = [bucket.slice_of(index[bucket.buffer.kind]) for bucket in layout.buckets]
        names = [bucket.buffer for bucket in layout.buckets]
        self.parameters = [stored[name][at.start : at.stop] for name, at in zip(names, own, strict=True)]
        self.gradients = [summed[name][at.start : at.stop] for name, at in zip(names, own, strict=True)]
        self.masters = self._masters(device)
        self.frozen: set[str] = set()  # parameters that are not trained

    def _masters(self, device: torch.device) -> list[Tensor]:
        rounded = [part for part in self.parameters if part.dtype != self.master_dtype]
        flat = torch.zeros(sum(map(len, rounded)), dtype=self.master_dtype, device=device)
        masters = iter(flat.split([len(part) for part in rounded]))
        return [part if part.dtype == self.master_dtype else next(masters) for part in self.parameters]

    def parameter(self, slot: BufferSlot, number: int) -> Tensor:
        """What the model computes with, in the shard's shape; `number` is the slot's bucket."""
        return _view(self._parameters[self.layout.buckets[number].buffer], slot)

    def gradient(self, slot: BufferSlot, number: int) -> Tensor:
        """The sum of this rank's own gradients, in the shard's shape; after the sync only slices are of use."""
        return _view(self._gradients[self.layout.buckets[number].buffer], slot)

    def attach(self, *chunks: nn.Module, with_main_grad: Iterable[str] = ()) -> dict[str, Tensor]:
        """Make the parameters of all chunks of the model views of their buffer and add up their gradients in the other.

        The model itself accumulates the gradients of the parameters named in `with_main_grad`, in the tensors that are
        returned by name. A parameter that wants no gradient is frozen: nothing changes it.
        """
        own = set(with_main_grad)
        main_grads = {}
        parameters = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
        names = [slot.record.name for slot in self.layout.slots]
        assert sorted(parameters) == sorted(names), set(parameters) ^ set(names)
        for number, bucket in enumerate(self.layout.buckets):
            for slot in bucket.slots:
                name = slot.record.name
                parameter, total = parameters[name], self.gradient(slot, number)
                assert tuple(parameter.shape) == slot.shard.shape, (slot, parameter.shape)
                parameter.data = self.parameter(slot, number)
                if not parameter.requires_grad:
                    self.frozen.add(name)
                elif name in own:
                    main_grads[name] = total
                else:
                    _add_up(parameter, total)
        return main_grads

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for gradients in self._gradients.values():
            gradients.zero_()

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set masters and parameters to `values`: (name, tensor) pairs, the tensor logical or this rank's shard."""
        slots = {slot.record.name: (slot, at) for at, bucket in enumerate(self.layout.buckets) for slot in bucket.slots}
        own: dict[str, list[OwnedRange]] = {name: [] for name in slots}
        for each in self.owned:
            own[each.slot.record.name].append(each)
        for name, value in values:
            slot, number = slots[name]
            if value.shape != slot.shard.shape:
                value = _shard_of(value, slot)
            self.parameter(slot, number).copy_(value)
            flat = value.reshape(-1)
            for each in own[name]:
                part = flat[each.in_parameter.start : each.in_parameter.stop]
                self.masters[number][each.in_slice.start : each.in_slice.stop].copy_(part)

    @torch.no_grad()
    def round_masters(self) -> None:
        """This rank's slices of the parameters become its masters, rounded to the model's dtype."""
        for part, master in zip(self.parameters, self.masters, strict=True):
            if part is not master:
                part.copy_(master)


def ranges_of(slices: Sequence[Tensor], ranges: Iterable[SliceRange]) -> list[Tensor]:
    """The ranges as views of `slices` (one flat tensor per bucket)."""
    return [slices[each.bucket][each.start : each.stop] for each in ranges]


def _view(buffer: Tensor, slot: BufferSlot) -> Tensor:
    return buffer[slot.start : slot.start + prod(slot.shard.shape)].view(slot.shard.shape)


def _shard_of(value: Tensor, slot: BufferSlot) -> Tensor:
    """This rank's part of a logical tensor."""
    assert value.shape == slot.record.shape, (slot, value.shape)
    part = value.new_empty(slot.shard.shape)
    for box in slot.shard.boxes:
        part[box.local] = value[box.logical]
    return part


def _add_up(parameter: nn.Parameter, total: Tensor) -> None:
    """Have each gradient of the parameter added to `total` and forgotten."""

    def accumulate(ready: Tensor) -> None:
        assert ready.grad is not None
        # Of two dtypes, the sum is one kernel on CUDA, and on CPUs several times slower than of one.
        total.add_(ready.grad if total.is_cuda else ready.grad.to(total.dtype))
        ready.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
