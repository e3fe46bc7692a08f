"""Weight gradients that wait until a schedule asks for them (zero bubble: Qi et al. 2023, arXiv 2401.10241, section 2).

While a backward runs under `collecting`, each product with a main gradient computes the gradient of its input alone and
puts the rest here. `run_next` does all of one microbatch: microbatches in the order in which they were collected, the
work of one in the order in which backward came to it, so that every sum is made of the same bits in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Later = Callable[[Callable[[], None]], None]  # does what it is given: now, or after the work that has been put off


@dataclass(frozen=True)
class _Microbatch:
    works: deque[tuple[Callable[[], None], bool]] = field(default_factory=deque)  # and whether it has a beginning
    beginnings: deque[Callable[[], None]] = field(default_factory=deque)


class DeferredWork:
    """The work that one chunk of a pipeline stage has put off, by microbatch. What it holds is free once it is done."""

    def __init__(self) -> None:
        self.active = False  # whether work is to be put here, instead of being done at once
        self._microbatches: deque[_Microbatch] = deque()

    def __len__(self) -> int:
        """Microbatches that wait."""
        return len(self._microbatches)

    @contextmanager
    def collecting(self, split: bool = True) -> Iterator[None]:
        """The backward of one microbatch runs in here; not `split`, it does all its work itself."""
        assert not self.active, "one backward at a time"
        if not split:
            yield
            return
        self._microbatches.append(_Microbatch())
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def put(self, work: Callable[[], None], begin: Callable[[], None] | None = None) -> None:
        """Do `work` later. `begin` starts what it waits for (a collective): one of them is always ahead."""
        assert self.active, "nobody collects"
        microbatch = self._microbatches[-1]
        microbatch.works.append((work, begin is not None))
        if begin is not None:
            microbatch.beginnings.append(begin)

    @torch.no_grad()
    def run_next(self) -> None:
        """Do all work of the microbatch that has waited longest."""
        assert not self.active, "the backward that puts work here is still running"
        microbatch = self._microbatches.popleft()
        _begin_next(microbatch)
        while microbatch.works:
            work, begun = microbatch.works.popleft()
            if begun:
                _begin_next(microbatch)
            work()


def _begin_next(microbatch: _Microbatch) -> None:
    if microbatch.beginnings:
        microbatch.beginnings.popleft()()
