"""Learning rate and weight decay as pure functions of the step.

Steps count from 0; the last one of a schedule is `steps - 1`. Warm-up step k of w has peak * (k + 1) / (w + 1), as in
nanoGPT: never zero, and step w is the first at the peak. The decaying schedules then fall to `min_lr`, which the last
step has exactly; beyond it the rate stays. A table has the whole shape: its share 0 is the first step, 1 the last. The
schedule of a later phase of the run begins where the one before it ended: that is its peak, unless the phase sets
optimizer.lr, and what its warm-up rises from.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from megalite.config.phases import PEAK, RunPhase
from megalite.config.schema import LearningRateConfig


def step_rates(step: int, phases: Sequence[RunPhase]) -> tuple[float, float]:
    """Learning rate of `step` (from 0) of a run, and the share of each weight decay that it has."""
    first, lr = phases[0].config, _rate(step, phases)
    schedule, peak = first.optimizer.weight_decay_schedule, first.optimizer.lr
    return lr, decay_factor(step, schedule, lr=lr, peak=peak, steps=first.train.steps)


def _rate(step: int, phases: Sequence[RunPhase]) -> float:
    """Learning rate of a step by the newest phase before its end that has a schedule."""
    own = [at for at, phase in enumerate(phases) if phase.begin <= step and (phase.schedules or not at)][-1]
    phase, config = phases[own], phases[own].config
    before = phase.start_lr if phase.start_lr is not None else _rate(phase.begin - 1, phases[:own]) if own else 0.0
    peak = config.optimizer.lr if not own or PEAK in phase.changes else before
    return learning_rate(step - phase.begin, config.lr, peak=peak, steps=config.lr.steps, start=before)


def learning_rate(step: int, config: LearningRateConfig, *, peak: float, steps: int, start: float = 0.0) -> float:
    """Learning rate of `step` (from 0) of a schedule of `steps` steps, whose warm-up rises from `start`; no field of
    `config` is None any more."""
    warmup, lowest, decay = config.warmup_steps, config.min_lr, config.decay_steps
    last = steps - 1
    step = min(step, last)
    if config.schedule == "table":
        return peak * interpolated(config.table, step / max(last, 1))
    if step < warmup:
        return start + (peak - start) * (step + 1) / (warmup + 1)
    begin = max(warmup, last - decay) if config.schedule == "wsd" else warmup
    if step <= begin or config.schedule == "constant":
        return peak
    progress = (step - begin) / (last - begin)  # in (0, 1]
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return lowest + remaining * (peak - lowest)


def interpolated(points: Sequence[Sequence[float]], at: float) -> float:
    """Height at `at` of the line through the points, level before the first and after the last."""
    for (start, low), (stop, high) in pairwise(points):
        if at < stop:
            return low + (high - low) * max(0.0, (at - start) / (stop - start))
    return points[-1][1]


def decay_factor(step: int, schedule: str, *, lr: float, peak: float, steps: int) -> float:
    """Share of each weight decay that `step` (from 0), whose learning rate is `lr`, has in a run of `steps` steps."""
    if schedule == "with_lr":
        return lr / peak
    return 1 - min(step, steps - 1) / steps if schedule == "to_zero" else 1.0
