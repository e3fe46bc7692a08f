"""Weight gradients that wait until a schedule asks for them (zero bubble: Qi et al. 2023, arXiv 2401.10241, section 2).

While a backward runs under `collecting`, each product with a main gradient computes the gradient of its input alone and
puts the rest here. `run_next` does the rest of one microbatch, all in the order in which backward came to it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], object]
Later = Callable[[Work], None]  # `DeferredWork.put`


class DeferredWork:
    """The work that one chunk of a pipeline stage has put off, by microbatch. What it holds is free once it is done."""

    def __init__(self) -> None:
        self.active = False  # whether work is to be put here, instead of being done at once
        self._microbatches: deque[deque[tuple[Work, Work | None]]] = deque()

    def __len__(self) -> int:
        """Microbatches that wait."""
        return len(self._microbatches)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """The backward of one microbatch runs in here."""
        assert not self.active, "one backward at a time"
        self._microbatches.append(deque())
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def put(self, work: Work, begin: Work | None = None) -> None:
        """Do `work` after what this backward has put off; now, if it puts nothing off. `begin` starts what the work
        waits for (a collective): one of them is always ahead."""
        if self.active:
            self._microbatches[-1].append((work, begin))
        else:
            work()

    @torch.no_grad()
    def run_next(self) -> None:
        """Do all work of the microbatch that has waited longest."""
        assert not self.active, "the backward that puts work here is still running"
        works = self._microbatches.popleft()
        begins = deque(begin for _, begin in works if begin is not None)
        if begins:
            begins.popleft()()
        while works:
            work, begin = works.popleft()
            if begin is not None and begins:
                begins.popleft()()
            work()
