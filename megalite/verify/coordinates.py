"""Whether activations keep their size as a model grows: the same training at several widths, measured before and after.

What is measured is the mean absolute activation of each place (the embedding, each block's output, the logits) for the
first microbatch. Over the widths it is fitted by width to some power. With the right scaling the power stays near 0, so
that what a step does at one width it does at all (Yang et al. 2022, arXiv 2203.03466, appendix D). One process.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from math import isfinite, nan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalite.config.derive import derive_vocabulary
from megalite.config.phases import phases_of
from megalite.config.schema import Config
from megalite.config.step_plan import planned_steps
from megalite.data.batch import Batch
from megalite.data.batches import train_batches
from megalite.data.open import open_data
from megalite.launch.context import ParallelContext
from megalite.launch.device import choose_device, choose_precision
from megalite.launch.process import ProcessEnvironment
from megalite.optim.schedule import step_rates
from megalite.prepare.prepare import prepare
from megalite.train.build import Training, build_training, derive_device, fill_with_start_values
from megalite.train.step import TrainStep

Sizes = Mapping[str, float]  # mean absolute activations by place


class Measured(NamedTuple):
    """Activations at each width, before the first step and after the last."""

    before: dict[int, Sizes]
    after: dict[int, Sizes]

    @property
    def places(self) -> list[str]:
        return [*next(iter(self.after.values()))]

    def power(self, place: str) -> float:
        """The p with which the activations after the last step grow as width^p: a line through the logarithms. NaN
        where some are 0 or not finite."""
        widths, sizes = zip(*((width, sizes[place]) for width, sizes in self.after.items()), strict=True)
        known = all(isfinite(size) and size > 0 for size in sizes)
        return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0]) if known else nan


def measure(configs: Mapping[int, Config], say: Callable[[int], object]) -> Measured:
    """Train as each config says, by width; `say` is told each width before. The configs are derived."""
    found = Measured({}, {})
    for width, config in configs.items():
        say(width)
        found.before[width], found.after[width] = _train(config)
    return found


def _train(config: Config) -> tuple[Sizes, Sizes]:
    device = choose_device(config.device, ProcessEnvironment())
    context = ParallelContext(device=device, dtype=choose_precision(config.precision, device))
    data = open_data(config, prepare(config)).train
    config = derive_device(derive_vocabulary(config, data.vocab_size), context)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    training.cast_and_gather_params()
    step, plan = TrainStep(training, config.optimizer, context), planned_steps(config.train, done=0, samples=0)
    with train_batches(data, config, plan, device) as arriving:
        batches = [*islice(arriving, config.train.steps)]
    before = _activations(training, batches[0].microbatches[0])
    for number, batch in enumerate(batches):
        rate, decay = step_rates(number, phases_of(config))
        step(batch.microbatches, batch.local_tokens, rate, decay_factor=decay).read()
    return before, _activations(training, batches[0].microbatches[0])


@torch.no_grad()
def _activations(training: Training, batch: Batch) -> Sizes:
    """The mean absolute activation of each place, in the order of the forward pass."""
    [model], found = training.chunks, dict[str, float]()
    blocks = {f"block {int(name) + 1}": block for name, block in model.blocks.items()}

    def note(place: str, output: Tensor) -> None:
        found[place] = output.double().abs().mean().item()

    hooks = [
        module.register_forward_hook(lambda module, inputs, output, place=place: note(place, output))
        for place, module in {"embedding": model.embedding, **blocks}.items()
    ]
    with training.evaluating():
        note("logits", model.logits(batch))
    for hook in hooks:
        hook.remove()
    return found
