"""Computes `consumer(function(*inputs))` without keeping what the function computes: backward runs the function again.

The function is a norm, an activation or the core of attention; the consumer is what it feeds. Of the function's work
only the inputs are kept. Backward runs it once more, when it first asks for anything of it, and hands each tensor out
once: the consumer's weight gradient gets the output back, the function's own gradient its inner tensors, and each is
free right after use (Megatron's output-discarding checkpoint, and its recomputed core attention in one). Gradients are
the same bits as without. Whole blocks are recomputed by torch's own checkpoint, around the block.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def checkpoint_without_output(
    function: Callable[..., Tensor],
    consumer: Callable[[Tensor], Tensor],
    *inputs: Tensor,
    recompute: bool,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """consumer(function(*inputs)); with `recompute`, keeping nothing of what the function does but its inputs.

    The function saves for backward what depends on its inputs alone, and the consumer changes its argument not in
    place. `around` is entered when backward rebuilds, for what the caller of forward had set up (the choice of
    attention's kernel).

    Compiled code takes torch's checkpoint around the function: the partitioner then rebuilds the consumer's argument
    too. Left to itself it keeps the argument of every matrix product.
    """
    if not (recompute and torch.is_grad_enabled()):
        return consumer(function(*inputs))
    if torch.compiler.is_compiling():
        return consumer(checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False))
    work = _Work(function, inputs, around)
    output = work.first_run(inputs)
    with saved_tensors_hooks(work.packing(output), work.unpack):
        return consumer(output)


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

    def first_run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with saved_tensors_hooks(lambda _: self._new_slot(), self.unpack):
            return self._function(*inputs)

    def packing(self, output: Tensor) -> Callable[[Tensor], Tensor | _Slot]:
        """What the consumer saves of `output` becomes a slot; whatever else it saves is kept as it is."""
        storage, start, dtype = output.untyped_storage().data_ptr(), int(output.storage_offset()), output.dtype

        def pack(saved: Tensor) -> Tensor | _Slot:
            if saved.dtype != dtype or saved.untyped_storage().data_ptr() != storage:
                return saved
            return self._new_slot((saved.size(), saved.stride(), int(saved.storage_offset()) - start))

        return pack

    def unpack(self, packed: Tensor | _Slot) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.number not in self._rebuilt:
            self._run_again()
        return self._rebuilt.pop(packed.number)

    def _new_slot(self, view: tuple[torch.Size, tuple[int, ...], int] | None = None) -> _Slot:
        self._slots.append(_Slot(len(self._slots), view))
        return self._slots[-1]

    def _run_again(self) -> None:
        """Fill all slots: the function saves the same tensors in the same order."""
        inner: list[Tensor] = []
        inputs = []
        for x, requires_grad, version in self._inputs:
            assert x._version == version, "an input of recomputed work was changed in place"
            inputs.append(x.detach().requires_grad_(requires_grad))
        keep = saved_tensors_hooks(lambda saved: inner.append(saved.detach()), _refuse)
        with torch.enable_grad(), self._around(), keep:
            output = self._function(*inputs).detach()
        assert len(inner) == sum(slot.view is None for slot in self._slots), (len(inner), self._slots)
        saved = iter(inner)
        for slot in self._slots:
            self._rebuilt[slot.number] = next(saved) if slot.view is None else _view(output, *slot.view)


def _view(output: Tensor, size: torch.Size, strides: tuple[int, ...], offset: int) -> Tensor:
    return output.as_strided(size, strides, int(output.storage_offset()) + offset)


def _refuse(_: object) -> Tensor:
    raise AssertionError("the graph of a rebuild is never walked")
