"""Learning rate and weight decay as pure functions of the step.

Steps count from 0; the last one of a run is `steps - 1`. Warm-up step k of w has peak * (k + 1) / (w + 1), as in
nanoGPT: never zero, and step w is the first at the peak. The decaying schedules then fall to `min_lr`, which the last
step has exactly; beyond it the rate stays. A table has the whole shape: its share 0 is the first step, 1 the last.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from megalite.config.schema import Config, LearningRateConfig


def step_rates(step: int, config: Config) -> tuple[float, float]:
    """Learning rate of `step` (from 0), and the share of each weight decay that it has."""
    peak, steps = config.optimizer.lr, config.train.steps
    lr = learning_rate(step, config.lr, peak=peak, steps=steps)
    return lr, decay_factor(step, config.optimizer.weight_decay_schedule, lr=lr, peak=peak, steps=steps)


def learning_rate(step: int, config: LearningRateConfig, *, peak: float, steps: int) -> float:
    """Learning rate of `step` (from 0) in a run of `steps` steps; no field of `config` is None any more."""
    warmup, lowest, decay = config.warmup_steps, config.min_lr, config.decay_steps
    last = steps - 1
    step = min(step, last)
    if config.schedule == "table":
        return peak * interpolated(config.table, step / max(last, 1))
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    start = max(warmup, last - decay) if config.schedule == "wsd" else warmup
    if step <= start or config.schedule == "constant":
        return peak
    progress = (step - start) / (last - start)  # in (0, 1]
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
