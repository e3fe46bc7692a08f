"""The protocol of an optimizer, and the place where one is made.

A new optimizer is a file with a class of this form, a row of `OPTIMIZERS` in config/schema.py, and a case of
`make_optimizer`. Sharding, checkpoints (in any layout), the check of replicas and the formulas of memory follow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import SliceRange, slice_ranges
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.groups import UpdateRule, update_rules
from megalite.optim.muon import Muon

State = Mapping[str, Sequence[Tensor] | Tensor]


class Optimizer(Protocol):
    """Updates the masters of `TrainingBuffers`, of which a rank owns one flat slice per bucket.

    `before_change` is called before a step changes masters or state. `rounds` says whether `step` also writes the
    rounded masters into the parameters.
    """

    before_change: Callable[[], None]
    rounds: bool

    def state(self) -> State:
        """The live tensors to be saved, by the name that checkpoints have for them: lists of slices like the masters
        (empty for a bucket without such state), or a tensor [1] that is equal on all ranks."""
        ...

    def step(self, lr: Tensor, *, divisor: Tensor, skip: Tensor, decay_factor: float = 1.0) -> None:
        """One step with the gradients divided by `divisor`, or none where `skip` is 1.0, bit for bit (all 0-d).
        Each weight decay is multiplied by `decay_factor`, which the host knows from the step.

        Nothing waits for the device. The gradients are used up: they may hold the divided ones afterwards.
        """
        ...


def slices_of(state: State) -> dict[str, list[Tensor]]:
    """The part of an optimizer's state that the ranks share: slices by name."""
    return {name: list(kept) for name, kept in state.items() if not isinstance(kept, Tensor)}


def make_optimizer(buffers: TrainingBuffers, config: Config, context: ParallelContext) -> Optimizer:
    """The optimizer that the settings name, with the learning rate and weight decay of each parameter."""
    settings = config.optimizer
    compiled = config.train.compile and context.device.type == "cuda"  # on a CPU torch's own kernel is the faster one
    matrices = {bucket for bucket, each in enumerate(buffers.layout.buckets) if each.whole and settings.name == "muon"}
    owned = [one for one in buffers.owned if one.bucket not in matrices]
    rules = update_rules((slot.record for slot, _ in buffers.places.values()), config)

    def runs_of(rule: UpdateRule) -> list[SliceRange]:
        return slice_ranges(owned, lambda record, _: rules[record.name] == rule)

    groups = [(runs_of(rule), rule) for rule in dict.fromkeys(rules.values())]
    rounds = compiled and settings.name == "adamw" and settings.qk_clip is None  # else masters change after its step
    adamw = FlatAdamW(buffers, groups, settings, compiled=compiled, rounds=rounds, without=matrices)
    return Muon(buffers, config, context, adamw, rules) if settings.name == "muon" else adamw
