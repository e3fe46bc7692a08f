"""Which samples each step of a run takes: pure arithmetic on the settings.

A step takes the samples after those of the steps before it. Their number follows from the first sample alone
(train.batch_ramp), so that a run which goes on, on any layout, needs to know only how many samples it has consumed. A
step of train.skip_steps consumes its samples like any other; nobody reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from megalite.config.schema import Config, TrainConfig

MOST_SIZES = 10_000


def batch_sizes(train: TrainConfig) -> range:
    """The ascending sizes of global batches: the full one alone without train.batch_ramp, and where its numbers are no
    ramp (`ramp_flaw`)."""
    full = train.global_batch_size
    if train.batch_ramp is None or ramp_flaw(train):
        return range(full, full + 1)
    start, increment, _ = train.batch_ramp
    return range(start, full + 1, increment)


def ramp_flaw(train: TrainConfig) -> str | None:
    """Why the numbers of train.batch_ramp are no ramp to train.global_batch_size, as a rule that they break."""
    if train.batch_ramp is None:
        return None
    if len(train.batch_ramp) != 3 or min(train.batch_ramp) < 1:
        return "must be three whole numbers, each at least 1: start, increment, samples"
    start, increment, _ = train.batch_ramp
    steps, rest = divmod(train.global_batch_size - start, increment)
    if rest or not 0 < steps <= MOST_SIZES:
        full = f"train.global_batch_size={train.global_batch_size}"
        return f"steps of {increment} must lead from {start} to {full}, at most {MOST_SIZES:,} of them"
    return None


@dataclass(frozen=True)
class PlannedStep:
    """Step number `step` (from 1) takes the samples [first, first + sequences); `skipped`: without training on them."""

    step: int
    first: int
    sequences: int
    skipped: bool


def planned_steps(train: TrainConfig, *, done: int, samples: int) -> Iterator[PlannedStep]:
    """The steps after the first `done`, which have consumed `samples`; they do not end. Batches grow through their
    sizes at equal distances in samples: Megatron-LM's --rampup-batch-size, in whole numbers."""
    sizes, skipped = batch_sizes(train), frozenset(train.skip_steps)
    growing = train.batch_ramp[-1] if train.batch_ramp else 0  # samples, after which batches are full
    for step in count(done + 1):
        sequences = sizes[-1 if samples >= growing else samples * (len(sizes) - 1) // growing]
        yield PlannedStep(step, samples, sequences, step in skipped)
        samples += sequences


def micro_batch_is_fixed(config: Config) -> bool:
    """Whether memory must not choose the micro-batch size: another one would be another training, where experts'
    balance or capacity counts by microbatch, or other bits, where a run must repeat."""
    moe = config.model.moe
    counted = (moe.aux_loss == "microbatch" and moe.aux_loss_coeff > 0) or moe.capacity_factor is not None
    return config.train.deterministic or (moe.num_experts > 0 and counted)
