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
HORIZONS = ("train.steps", *(f"train.{name}" for name in ("tokens", "tokens_per_parameter", "flops", "epochs")))
FOLLOW_LENGTH = ("train.steps", "lr.warmup_steps", "lr.decay_steps", "lr.steps")  # from what a run has consumed
USUAL_STEPS = 200
IN_TOKENS = {  # the same in steps and in tokens
    "lr.warmup_steps": "lr.warmup_tokens",
    "lr.decay_steps": "lr.decay_tokens",
    "train.eval_interval": "train.eval_interval_tokens",
    "checkpoint.interval": "checkpoint.interval_tokens",
}


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
    skipped = frozenset(train.skip_steps)
    for before, first, sequences, number in equal_steps(train, done=done, samples=samples):
        for at in count() if number is None else range(number):
            step = before + at + 1
            yield PlannedStep(step, first + at * sequences, sequences, step in skipped)


def equal_steps(train: TrainConfig, *, done: int, samples: int) -> Iterator[tuple[int, int, int, int | None]]:
    """The same steps, those with batches of one size together: steps and samples before them, sequences of a batch, and
    how many steps; None: they do not end."""
    sizes, increments = batch_sizes(train), len(batch_sizes(train)) - 1
    growing = train.batch_ramp[-1] if train.batch_ramp and increments else 0  # samples, after which batches are full
    while samples < growing:
        at = samples * increments // growing
        until = -(-(at + 1) * growing // increments)  # the first sample whose batch is larger
        number = -(-(until - samples) // sizes[at])
        yield done, samples, sizes[at], number
        done, samples = done + number, samples + number * sizes[at]
    yield done, samples, sizes[-1], None


def steps_to(train: TrainConfig, wanted: int, *, done: int = 0, samples: int = 0) -> int:
    """The least number of steps of a run that have consumed `wanted` samples; at least the first `done`."""
    for before, first, sequences, number in equal_steps(train, done=done, samples=samples):
        needed = max(0, -(-(wanted - first) // sequences))
        if number is None or needed <= number:
            return before + needed
    raise AssertionError("the last steps do not end")


def samples_after(train: TrainConfig, steps: int, *, done: int = 0, samples: int = 0) -> int:
    """How many samples a run of so many steps has consumed in the end."""
    for before, first, sequences, number in equal_steps(train, done=done, samples=samples):
        if number is None or steps - before <= number:
            return first + max(0, steps - before) * sequences
    raise AssertionError("the last steps do not end")


def warmup_and_decay(config: Config, steps: int) -> tuple[int | None, int | None]:
    """Steps of the warm-up and of the final decay as they are given: the least number of first and of last ones that
    consume the tokens (more than all, where all do not), or the settings in steps; None: neither is given."""
    train, lr, length = config.train, config.lr, config.train.seq_length
    warmup = None if "lr.warmup_steps" in config.derived else lr.warmup_steps
    decay = None if "lr.decay_steps" in config.derived else lr.decay_steps
    if lr.warmup_tokens is not None:
        warmup = steps_to(train, -(-lr.warmup_tokens // length))
    if lr.decay_tokens is not None:
        before = samples_after(train, steps) + -lr.decay_tokens // length
        decay = steps + 1 if before < 0 else steps + 1 - steps_to(train, before + 1)
    return warmup, decay


def due_after(planned: PlannedStep, train: TrainConfig, steps: int, tokens: int | None) -> bool:
    """Whether something is due after a step: every so many steps (0: never), or where tokens are given, if the run
    passes a multiple of them by it."""
    if tokens is None:
        return steps > 0 and planned.step % steps == 0
    before, after = planned.first * train.seq_length, (planned.first + planned.sequences) * train.seq_length
    return after // tokens > before // tokens


def newest_step(train: TrainConfig, step: int, samples: int) -> PlannedStep:
    """The step by which a run has come to so many samples: sizes grow with the first sample, so that one alone fits."""
    sizes = batch_sizes(train)
    before = (next(planned_steps(train, done=step - 1, samples=samples - size)) for size in sizes if size <= samples)
    full = PlannedStep(step, max(0, samples - sizes[-1]), min(samples, sizes[-1]), False)
    return next((planned for planned in before if planned.first + planned.sequences == samples), full)


def horizon_of(train: TrainConfig) -> str:
    """The setting that says how long the run is."""
    given = (name for name in HORIZONS[1:] if getattr(train, name.removeprefix("train.")) is not None)
    return next(given, "train.steps")


def known_steps(train: TrainConfig) -> int | None:
    """The steps of the run as far as the settings tell; None: model and data must be known."""
    if train.tokens is not None:
        return steps_to(train, -(-train.tokens // train.seq_length))
    usual = USUAL_STEPS if train.steps is None else train.steps
    return usual if horizon_of(train) == "train.steps" else None


def micro_batch_is_fixed(config: Config) -> bool:
    """Whether memory must not choose the micro-batch size: another one would be another training, where experts'
    balance or capacity counts by microbatch, or other bits, where a run must repeat."""
    moe = config.model.moe
    counted = (moe.aux_loss == "microbatch" and moe.aux_loss_coeff > 0) or moe.capacity_factor is not None
    return config.train.deterministic or (moe.num_experts > 0 and counted)
