"""What runs in a test, by name, and ranks of which one alone exists."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.launch.context import ParallelContext
from megalite.launch.startup import join
from megalite.layout.ranks import ParallelLayout


class Operations(TorchDispatchMode):
    """Lists what `note(name, args, result)` makes of the operations inside, as `mm` or `all_reduce`; None: nothing."""

    def __init__(self, note: Callable[[str, Any, Any], Any]) -> None:
        super().__init__()
        self._note, self.noted = note, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        noted = self._note(func.overloadpacket.__name__, args, result)
        self.noted += [] if noted is None else [noted]
        return result


@contextmanager
def fake_rank(layout: ParallelLayout, rank: int = 0) -> Iterator[ParallelContext]:
    """A rank without the others. Communicators move nothing: gloo's threads let go of tensors some time after they are
    done with them."""
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        yield join(ParallelContext(layout, rank, dtype=torch.bfloat16), timeout_s=10)
    finally:
        dist.destroy_process_group()
