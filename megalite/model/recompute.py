"""Computes `consumer(function(*inputs))` without keeping what the function computes: backward runs the function again.

The function is a norm, an activation or the core of attention; the consumer is what it feeds. Backward runs the
function once more, when it first asks for anything of it, and hands each tensor out once: the consumer's weight
gradient gets the output back, the function's own gradient its inner tensors, and each is free right after use
(Megatron's output-discarding checkpoint, and its recomputed core attention in one). Gradients are the same bits as
without. Whole blocks are recomputed by torch's own checkpoint, around the block.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])


def checkpoint_without_output(
    function: Callable[..., Tensor],
    consumer: Callable[[Tensor], Result],
    *inputs: Tensor,
    recompute: bool,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Result:
    """consumer(function(*inputs)); with `recompute`, keeping nothing of what the function does but its inputs.

    The function saves for backward what depends on its inputs alone, and the consumer does not change its argument in
    place. `around` is entered when backward rebuilds, for what the caller of forward had set up (attention's kernel).
    Compiled code takes torch's checkpoint around the function: the partitioner then rebuilds the consumer's argument
    too. Left to itself it keeps the argument of every matrix product.
    """
    if not (recompute and torch.is_grad_enabled()):
        return consumer(function(*inputs))
    if torch.compiler.is_compiling():
        return consumer(checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False))
    return _Work(function, inputs, around).run(inputs, consumer)


@dataclass(frozen=True)
class _Slot:
    """In place of a tensor that the graph saved. `view`: size, strides and offset in the output, if it is one of it."""

    number: int
    view: tuple[torch.Size, tuple[int, ...], int] | None = None


class _Work:
    """One call of a function, done again for backward. The graph holds this object, by its hooks; it holds no graph."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._function, self._around = function, around
        self._inputs = [(x.detach(), x.requires_grad, x._version) for x in inputs]
        self._slots: list[_Slot] = []
        self._rebuilt: dict[int, Tensor] = {}

    def run(self, inputs: tuple[Tensor, ...], consumer: Callable[[Tensor], Result]) -> Result:
        with saved_tensors_hooks(lambda _: self._new_slot(), self._unpack):
            output = self._function(*inputs)
        storage, start, dtype = output.untyped_storage().data_ptr(), int(output.storage_offset()), output.dtype

        def pack(saved: Tensor) -> Tensor | _Slot:
            """What the consumer saves of `output` becomes a slot; whatever else it saves is kept as it is."""
            if saved.dtype != dtype or saved.untyped_storage().data_ptr() != storage:
                return saved
            return self._new_slot((saved.size(), saved.stride(), int(saved.storage_offset()) - start))

        with saved_tensors_hooks(pack, self._unpack):
            return consumer(output)

    def _new_slot(self, view: tuple[torch.Size, tuple[int, ...], int] | None = None) -> _Slot:
        self._slots.append(_Slot(len(self._slots), view))
        return self._slots[-1]

    def _unpack(self, packed: Tensor | _Slot) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.number not in self._rebuilt:
            self._run_again()
        return self._rebuilt.pop(packed.number)

    def _run_again(self) -> None:
        """Fill all slots: the function saves the same tensors in the same order."""
        inner: list[Tensor] = []
        assert all(x._version == version for x, _, version in self._inputs), "an input was changed in place"
        inputs = [x.detach().requires_grad_(requires_grad) for x, requires_grad, _ in self._inputs]
        keep = saved_tensors_hooks(lambda saved: inner.append(saved.detach()), lambda _: Tensor())  # never unpacked
        with torch.enable_grad(), self._around(), keep:
            output = self._function(*inputs).detach()
        assert len(inner) == sum(slot.view is None for slot in self._slots), (len(inner), self._slots)
        saved, start = iter(inner), int(output.storage_offset())
        for slot in self._slots:
            if slot.view is None:
                self._rebuilt[slot.number] = next(saved)
            else:
                size, strides, offset = slot.view
                self._rebuilt[slot.number] = output.as_strided(size, strides, start + offset)
