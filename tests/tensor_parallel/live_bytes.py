"""How many bytes are alive: what backward keeps is measured by what is left after forward, whoever holds it."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sees the storages that operations allocate inside of it (not inside compiled code), and when they are gone."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        """`before`: tensors that were there already and do not count."""
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._before:
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), int(storage.nbytes())
        self.peak = max(self.peak, self.now())
        return results

    def now(self) -> int:
        self._seen = {key: value for key, value in self._seen.items() if not value[0].expired()}
        return sum(size for _, size in self._seen.values())
