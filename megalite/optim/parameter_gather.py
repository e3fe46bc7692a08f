"""Gathers the updated parameters from the ranks that own slices of them, while the next forward runs.

Buckets start in the order in which forward uses them, the reverse of backward's. A part of the model waits for its
buckets right before it is used (`GPT.before_use`).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from megalite.layout.buffer_layout import Kind
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.collectives import Pending, start_all_gather
from megalite.optim.sharing import Sharing


class ParameterGather:
    """Makes the parameter buckets whole from the slices of the ranks that share state.

    What waits for them does so within a `waiting()`.
    """

    def __init__(
        self,
        buffers: TrainingBuffers,
        sharing: Mapping[Kind, Sharing],
        *,
        overlap: bool = True,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._buffers = buffers
        self._overlap, self._waiting = overlap, waiting
        self._groups = [sharing[bucket.buffer.kind].shard_group for bucket in buffers.layout.buckets]
        self._pending: dict[int, Pending] = {}  # by bucket
        self._buckets_of: dict[str, set[int]] = {}  # by part of the model
        for name, (_, number) in buffers.places.items():
            self._buckets_of.setdefault(part_of(name), set()).add(number)

    def start(self) -> None:
        """Send this rank's slices. Nobody may write to the parameters before `finish`."""
        assert not self._pending, "the parameters of the step before are still on their way"
        for number in reversed(range(len(self._groups))):
            group = self._groups[number]
            if group is not None:
                self._pending[number] = start_all_gather(self._buffers.parameter_buckets[number], group)
        if not self._overlap:
            self.finish()

    def wait_for(self, part: str) -> None:
        """Return when all parameters of this part of the model (see `part_of`) are there."""
        self._wait_for(self._buckets_of.get(part, set()) & self._pending.keys())

    def finish(self) -> None:
        """Return when all parameters are there."""
        self._wait_for(set(self._pending))

    def _wait_for(self, numbers: set[int]) -> None:
        for number in sorted(numbers, reverse=True):  # as they were started
            with self._waiting():
                self._pending.pop(number).wait()


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: `blocks.3`, `embedding`, `final_norm`, `head`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first
