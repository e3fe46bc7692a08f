"""What torch's CPU allocator hands out, to whomever: the scratch memory of kernels and of gloo's threads included."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

Span = tuple[int, int]  # nanoseconds
ALWAYS = (0, 1 << 63)


@dataclass(frozen=True)
class Allocations:
    """All allocations (bytes above 0) and releases (below) while something ran, as (nanosecond, bytes), in order."""

    changes: list[tuple[int, int]]
    spans: dict[str, list[Span]]  # of torch.profiler.record_function, by name

    @property
    def left(self) -> int:
        """Bytes that were allocated and not freed."""
        return sum(size for _, size in self.changes)

    def peak(self, name: str) -> int:
        """The most bytes that were there at any moment of the spans of this name."""
        return max(self._most(span) for span in self.spans[name])

    def _most(self, span: Span) -> int:
        live = most = sum(size for moment, size in self.changes if moment < span[0])
        for size in (size for moment, size in self.changes if span[0] <= moment < span[1]):
            live += size
            most = max(most, live)
        return most


def allocations_of(function: Callable[[], Any]) -> tuple[Any, Allocations]:
    """The result of function(), and what was allocated until it was there. What lay there before does not count."""
    gc.disable()  # it would free what an earlier counting has seen allocated
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = function()
    finally:
        gc.enable()
    assert profiled.profiler is not None
    recorded = profiled.profiler.kineto_results  # torch's public tables add up allocations by operation
    assert recorded is not None
    spans: dict[str, list[Span]] = {}
    changes = []
    for event in recorded.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.is_user_annotation():
            spans.setdefault(event.name(), []).append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return result, Allocations(sorted(changes, key=lambda change: change[0]), spans)
