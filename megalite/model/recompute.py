"""Selective recompute: what a wrapped function computes is not kept for backward, which runs the function again.

The function is a norm, an activation or attention between its projections. Backward runs it once more, when something
of it is first asked for, and hands each tensor out once: to the function's own gradient its inner tensors, to whatever
consumed the output (a product, for its weight gradient) the output. Each is free right after use (Megatron's
output-discarding checkpoint, and its recomputed core attention in one). Gradients are the same bits as without.
Whole blocks are recomputed by torch's own checkpoint, around the block.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Tensor]
Slot = Callable[[], Tensor]  # in place of a tensor that the graph saved


class Recompute:
    """What backward computes again in one block: `modules` of "attention", "norm", "activation" and "moe"."""

    def __init__(self, modules: Collection[str] = ()) -> None:
        self.modules = frozenset(modules)
        self._outputs: dict[int, tuple[weakref.ref[Tensor], _Work]] = {}  # by the pointer of the storage

    def wrap(self, module: str, function: Function) -> Function:
        """The function, run again by backward if `module` is to be.

        What the function saves must depend on its arguments alone, which are tensors, and nobody may change its output
        in place. Compiled code takes torch's checkpoint: the partitioner then rebuilds the output for its consumer too.
        """
        if module not in self.modules:
            return function

        def rebuilt(*inputs: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return function(*inputs)
            if torch.compiler.is_compiling():
                again: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
                return again
            work = _Work(function, inputs)
            output = work.run(inputs)
            self._outputs[output.untyped_storage().data_ptr()] = weakref.ref(output), work
            return output

        return rebuilt

    def norm(self, norm: nn.Module) -> nn.Module:
        """The norm, which keeps its parameters' names; `wrap`ped."""
        if "norm" in self.modules:
            norm.forward = self.wrap("norm", norm.forward)
        return norm

    def outputs_dropped(self) -> AbstractContextManager[object]:
        """While it is entered, nobody keeps the output of a wrapped function for backward."""
        if not self.modules or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return nullcontext()
        return self._dropping()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._outputs.clear()

    def _pack(self, saved: Tensor) -> Tensor | Slot:
        found = self._outputs.get(saved.untyped_storage().data_ptr())
        output = found and found[0]()
        if found is None or output is None or output.dtype != saved.dtype:
            return saved
        offset = int(saved.storage_offset()) - int(output.storage_offset())
        return found[1].slot((saved.size(), saved.stride(), offset))


View = tuple[torch.Size, tuple[int, ...], int]  # of a function's output: size, strides and offset


class _Work:
    """One call of a function, done again for backward. The graph holds this object by its slots; it holds no graph."""

    def __init__(self, function: Function, inputs: tuple[Tensor, ...]) -> None:
        self._function = function
        self._inputs = [(x.detach(), x.requires_grad, x._version) for x in inputs]
        self._slots: list[View | None] = []
        self._rebuilt: dict[int, Tensor] = {}

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with saved_tensors_hooks(lambda _: self.slot(), _unpack):
            return self._function(*inputs)

    def slot(self, view: View | None = None) -> Slot:
        """A new one, of a tensor that the function saves or of a view of its output."""
        self._slots.append(view)
        return partial(self._take, len(self._slots) - 1)

    def _take(self, number: int) -> Tensor:
        """The tensor of a slot, once for each time that backward asks."""
        if number not in self._rebuilt:
            self._run_again()
        return self._rebuilt.pop(number)

    def _run_again(self) -> None:
        """Fill all slots: the function saves the same tensors in the same order."""
        inner: list[Tensor] = []
        assert all(x._version == version for x, _, version in self._inputs), "an input was changed in place"
        inputs = [x.detach().requires_grad_(requires_grad) for x, requires_grad, _ in self._inputs]
        keep = saved_tensors_hooks(lambda saved: inner.append(saved.detach()), lambda _: Tensor())  # never unpacked
        with torch.enable_grad(), keep:
            output = self._function(*inputs).detach()
        assert len(inner) == self._slots.count(None), (len(inner), self._slots)
        saved, start = iter(inner), int(output.storage_offset())
        for number, view in enumerate(self._slots):
            if view is None:
                self._rebuilt[number] = next(saved)
            else:
                size, strides, offset = view
                self._rebuilt[number] = output.as_strided(size, strides, start + offset)


def _unpack(packed: Tensor | Slot) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()
