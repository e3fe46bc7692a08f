"""Holds all parameters in contiguous buckets, all gradients in others of the same layout, and a rank's share of both.

Parameters of the model become views of the parameter buckets; gradients of all microbatches are added up in the
gradient buckets, by the model's own backward or by one hook per parameter. A rank's share of anything (masters,
gradients once they are summed, optimizer state) is a list of one flat tensor per bucket: the rank's slices.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megalite.kernels.embed import set_main_grad
from megalite.launch.device import DTYPES
from megalite.layout.buffer_layout import BufferLayout, BufferSlot, Kind, OwnedRange, SliceRange

EMA = "ema"  # what checkpoints call the averages of masters
PIECE = 1 << 24  # elements that change places at once


class TrainingBuffers:
    """Parameters, gradients and masters of one model on one rank.

    `parameter_buckets` and `gradient_buckets` ([bucket's size] each) are whole; `parameters`, `gradients` and `masters`
    ([bucket's size / shards] each) are this rank's slices, and `index` its place among those that share them.
    The optimizer updates the masters, in fp32 (fp64 in fp64). Where parameters already have that dtype, masters alias
    their slices; otherwise they view one separate tensor. Gradients have `gradient_dtype`, the masters' by default.
    With `ema` there are averages of the masters, which begin as these. `kept` has both, by their names in checkpoints.
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
        ema: bool = False,
    ) -> None:
        self.layout, self.device = layout, device
        self.index: dict[Kind, int] = {"dense": dense, "expert": expert}
        self.owned = layout.owned(dense, expert)
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = {"model": dtype, "master": self.master_dtype}
        self.parameter_buckets = [
            torch.zeros(bucket.size, dtype=dtypes[bucket.precision], device=device) for bucket in layout.buckets
        ]
        summed_in = gradient_dtype or self.master_dtype
        self.gradient_buckets = [torch.zeros_like(whole, dtype=summed_in) for whole in self.parameter_buckets]
        own = [self.index[bucket.kind] for bucket in layout.buckets]
        self.parameters, self.gradients = (
            [whole.chunk(bucket.shards)[at] for whole, bucket, at in zip(buckets, layout.buckets, own, strict=True)]
            for buckets in (self.parameter_buckets, self.gradient_buckets)
        )
        rounded = [len(part) for part in self.parameters if part.dtype != self.master_dtype]
        flat = iter(torch.zeros(sum(rounded), dtype=self.master_dtype, device=device).split(rounded))
        self.masters = [part if part.dtype == self.master_dtype else next(flat) for part in self.parameters]
        sizes = [len(master) for master in self.masters if ema]
        self.averages = list(torch.zeros(sum(sizes), dtype=self.master_dtype, device=device).split(sizes))
        self.kept = {"master": self.masters} | ({EMA: self.averages} if ema else {})
        self.places = {  # by name: slot and number of the bucket
            slot.record.name: (slot, number) for number, bucket in enumerate(layout.buckets) for slot in bucket.slots
        }

    def parameter(self, name: str) -> Tensor:
        """The parameter that the model computes with, in the shard's shape."""
        return self._view(self.parameter_buckets, name)

    def gradient(self, name: str) -> Tensor:
        """The sum of this rank's own gradients, in the shard's shape; after the sync only slices are of use."""
        return self._view(self.gradient_buckets, name)

    def _view(self, buckets: Sequence[Tensor], name: str) -> Tensor:
        slot, number = self.places[name]
        return buckets[number][slot.start : slot.stop].view(slot.shard.shape)

    def attach(self, *chunks: nn.Module) -> None:
        """Make the parameters of all chunks of the model views of their bucket and add up their gradients in the other:
        the model's layers do, or autograd's gradients are added."""
        parameters = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters()}
        assert parameters.keys() == self.places.keys(), parameters.keys() ^ self.places.keys()
        for name, parameter in parameters.items():
            stored, total = self.parameter(name), self.gradient(name)
            assert parameter.shape == stored.shape, (name, parameter.shape, stored.shape)
            parameter.data = stored
            set_main_grad(parameter, total, name)
            parameter.register_post_accumulate_grad_hook(partial(_add_gradient, total))

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for gradients in self.gradient_buckets:
            gradients.zero_()

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set parameters, masters and averages to `values`: (name, tensor) pairs, the tensor logical or this rank's
        shard."""
        own: dict[str, list[OwnedRange]] = {name: [] for name in self.places}
        for each in self.owned:
            own[each.slot.record.name].append(each)
        for name, value in values:
            slot, number = self.places[name]
            value = value if value.shape == slot.shard.shape else _shard_of(value, slot)
            self.parameter(name).copy_(value)
            for each in own[name]:
                part = value.reshape(-1)[each.in_parameter.start : each.in_parameter.stop]
                for slices in self.kept.values():
                    slices[number][each.in_slice.start : each.in_slice.stop].copy_(part)

    @torch.no_grad()
    def round_masters(self) -> None:
        """This rank's slices of the parameters become its masters, rounded to the model's dtype."""
        for part, master in zip(self.parameters, self.masters, strict=True):
            if part is not master:
                part.copy_(master)

    @torch.no_grad()
    def average(self, weight: Tensor) -> None:
        """Move the averages towards the masters by this part of the way; 0 changes nothing."""
        for average, master in zip(self.averages, self.masters, strict=True):
            average.lerp_(master, weight.to(self.master_dtype))

    @torch.no_grad()
    def exchange_averages(self) -> None:
        """Masters and averages change places, to the bit."""
        pieces = ((one.split(PIECE) for one in pair) for pair in zip(self.masters, self.averages, strict=True))
        for master, average in (pair for split in pieces for pair in zip(*split, strict=True)):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)


def ranges_of(slices: Sequence[Tensor], ranges: Iterable[SliceRange]) -> list[Tensor]:
    """The ranges as views of `slices` (one flat tensor per bucket)."""
    return [slices[each.bucket][each.start : each.stop] for each in ranges]


def dtype_of(name: str, masters: torch.dtype) -> torch.dtype:
    """The dtype of a setting: in fp64 everything that is fp32 or narrower elsewhere is fp64."""
    return torch.float64 if masters == torch.float64 else DTYPES[name]


def _shard_of(value: Tensor, slot: BufferSlot) -> Tensor:
    """This rank's part of a logical tensor."""
    assert value.shape == slot.record.shape, (slot, value.shape)
    part = value.new_empty(slot.shard.shape)
    for box in slot.shard.boxes:
        part[box.local] = value[box.logical]
    return part


def _add_gradient(total: Tensor, parameter: Tensor) -> None:
    """Add what autograd sums of the parameter's gradient to `total`, and forget it."""
    if parameter.grad is not None:
        # The sum of two dtypes is one kernel on CUDA, and on CPUs several times slower than that of one.
        total.add_(parameter.grad if total.is_cuda else parameter.grad.to(total.dtype))
        parameter.grad = None
