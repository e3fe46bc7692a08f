"""Which samples each step of a run takes: pure arithmetic on the settings.

A step takes the samples after those of the steps before it. How many follows from the number of the first one alone
(train.batch_ramp), so that a run which goes on, on any layout, needs to know nothing but how many samples it has
consumed. A step of train.skip_steps consumes its samples like any other; nobody reads them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from megalite.config.schema import TrainConfig

MOST_SIZES = 10_000


@dataclass(frozen=True)
class BatchRamp:
    """Global batches of `start` sequences at first, that grow by `increment` at equal distances in samples, and hold
    `full` sequences from sample `samples` on. Megatron-LM's --rampup-batch-size, in whole numbers."""

    start: int
    increment: int
    samples: int
    full: int

    @property
    def sizes(self) -> range:
        """Every size that a batch may have, ascending."""
        return range(self.start, self.full + 1, self.increment)

    def size(self, first: int) -> int:
        """Sequences of the batch whose first sample is `first`."""
        if first >= self.samples:
            return self.full
        return self.sizes[first * (len(self.sizes) - 1) // self.samples]

    def samples_after(self, batches: int, first: int = 0) -> int:
        """The sample after `batches` batches that begin with sample `first`."""
        increments = len(self.sizes) - 1
        for number, size in enumerate(self.sizes[:-1], 1):
            end = -(-number * self.samples // increments)  # the first sample of a larger batch
            of_size = min(batches, max(0, -(-(end - first) // size)))
            first, batches = first + of_size * size, batches - of_size
        return first + batches * self.full


def batch_ramp(train: TrainConfig) -> BatchRamp:
    """How batches grow; without train.batch_ramp they are of full size from the first on. Raises ValueError for numbers
    that are no ramp (`ramp_flaw`)."""
    full = train.global_batch_size
    if train.batch_ramp is None:
        return BatchRamp(full, 1, 0, full)
    if flaw := ramp_flaw(train):
        raise ValueError(flaw)
    start, increment, samples = train.batch_ramp
    return BatchRamp(start, increment, samples, full)


def ramp_flaw(train: TrainConfig) -> str | None:
    """Why the numbers of train.batch_ramp are no ramp to train.global_batch_size, as a rule that they break."""
    numbers, full = train.batch_ramp, train.global_batch_size
    if numbers is None:
        return None
    if len(numbers) != 3 or min(numbers) < 1:
        return "must be three whole numbers, each at least 1: start, increment, samples"
    start, increment, _ = numbers
    if start >= full:
        return f"must start below train.global_batch_size={full}"
    if (full - start) % increment:
        return f"steps of {increment} do not lead from {start} to train.global_batch_size={full}"
    if (full - start) // increment > MOST_SIZES:
        return f"has more than {MOST_SIZES:,} sizes up to train.global_batch_size={full}"
    return None


def ramp_sizes(train: TrainConfig) -> Sequence[int]:
    """All sizes of global batches, ascending; the full size alone where the numbers are no ramp."""
    return [train.global_batch_size] if ramp_flaw(train) else batch_ramp(train).sizes


def samples_when_longer(samples: int, before: int, now: int) -> int:
    """Samples of `now` tokens that cover `samples` of `before` tokens: rounded up, so that no token comes twice."""
    return -(-samples * before // now)


@dataclass(frozen=True)
class PlannedStep:
    """Step number `step` (from 1) takes the samples [first, first + sequences); `skipped`: without training on them."""

    step: int
    first: int
    sequences: int
    skipped: bool


def planned_steps(train: TrainConfig, *, done: int, samples: int) -> Iterator[PlannedStep]:
    """The steps after the first `done`, which have consumed `samples`; they do not end."""
    ramp, skipped = batch_ramp(train), frozenset(train.skip_steps)
    for step in count(done + 1):
        sequences = ramp.size(samples)
        yield PlannedStep(step, samples, sequences, step in skipped)
        samples += sequences
