"""The content of a checkpoint: named logical tensors and a handful of numbers.

Masters, the optimizer's state and (where they differ from the masters) parameters, each under its logical name.
Learning rate, data order and dropout masks are functions of the step, so the step is all there is besides.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.commit import STATE
from megalite.checkpoint.pieces import Piece, boxes
from megalite.checkpoint.reading import Found
from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep
from megalite.config.user_files import as_record
from megalite.layout.buffer_layout import OwnedRange
from megalite.model.parameters import gpt_parameters
from megalite.model.routers import Routers
from megalite.optim.memory import bytes_of_element
from megalite.optim.optimizer import slices_of
from megalite.train.build import Training
from megalite.train.metrics import StepMetrics

_ROUNDED = "parameter"  # kind of the tensors that are masters in the model's dtype


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0  # steps done, skipped ones and those of train.skip_steps included
    samples: int = 0  # consumed: the whole state of the data
    tokens: int = 0  # unmasked tokens of the steps that were applied
    bad_steps: int = 0  # steps that were skipped, in all
    empty_steps: int = 0  # steps without an unmasked token, which are not applied either
    bad_steps_in_a_row: int = 0
    last_applied: int = 0  # the newest step that changed weights; those before it have led to a finite loss

    def consume(self, planned: PlannedStep) -> None:
        """The step has consumed its samples, whether or not it was applied."""
        self.step, self.samples = planned.step, planned.first + planned.sequences

    def count(self, metrics: StepMetrics, least_scale: float) -> None:
        """The step was applied, or it was bad. Bad steps of fp16 are not in a row while the loss scale is above
        `least_scale`: it is still looked for."""
        if metrics.skipped:
            self.bad_steps += 1
            self.bad_steps_in_a_row += metrics.loss_scale is None or metrics.loss_scale <= least_scale
        else:
            self.bad_steps_in_a_row = 0
            self.tokens += metrics.batch_tokens
            self.last_applied = self.step


@dataclass(frozen=True)
class DataState:
    """Which data a run was trained on."""

    fingerprint: str
    description: str


@dataclass(frozen=True)
class SavedState:
    """The part of a checkpoint's state.json that is read again."""

    progress: Progress
    data: DataState
    config: dict[str, Any]
    loss_scale: list[float] | None = None
    tokenizer: dict[str, str] = field(default_factory=dict)  # hash of each file of its folder
    record: dict[str, Any] = field(default_factory=dict)  # a Seal of each file of the record, as it was then

    @classmethod
    def of(cls, found: Found) -> "SavedState":
        return as_record(cls, found.state, found.path / STATE)


def training_pieces(training: Training) -> list[Piece]:
    """Every tensor that a resumed run needs, as pieces over this rank's slices of the live buffers."""
    buffers, state = training.buffers, training.optimizer.state()
    kinds = {"master": buffers.masters, **slices_of(state)}
    if any(part is not master for part, master in zip(buffers.parameters, buffers.masters, strict=True)):
        kinds[_ROUNDED] = buffers.parameters
    pieces = [piece for kind, slices in kinds.items() for piece in owned_pieces(f"{kind}.", buffers.owned, slices)]
    pieces += [Piece(name, (len(value),), (0,), value) for name, value in Routers(training.chunks).state()]
    numbers = [(name, number) for name, number in state.items() if isinstance(number, Tensor)]
    return pieces + [Piece(f"optimizer.{name}", (1,), (0,), number) for name, number in numbers]


def is_rounded(name: str) -> bool:
    """Whether a saved tensor is a master in the model's dtype: a resume rounds the master anew and does not read it."""
    return name.startswith(f"{_ROUNDED}.")


@torch.no_grad()
def not_finite(pieces: Sequence[Piece]) -> list[str]:
    """Names of the tensors that hold an infinity or no number: one pass over the memory, one wait for the device."""
    held = [piece for piece in pieces if piece.tensor.numel()]
    extremes = torch.stack([torch.stack(piece.tensor.aminmax()).double() for piece in held])  # [n, 2]
    return [piece.name for piece, fine in zip(held, extremes.isfinite().all(dim=1).tolist(), strict=True) if not fine]


def state_bytes(config: Config) -> int:
    """Bytes of those tensors, of all ranks together: what a checkpoint needs on disk, but for a few KiB."""
    total = 0
    for record in gpt_parameters(config.model):
        kind = {"matrix": record.stacked is not None, "master_precision": record.precision == "master"}
        element = bytes_of_element(config.precision, config.optimizer, **kind)
        total += record.numel * (element.parameters + element.masters + element.optimizer)
    return total


def owned_pieces(prefix: str, owned: Iterable[OwnedRange], slices: Sequence[Tensor]) -> Iterator[Piece]:
    """The elements of each parameter in the slices (one flat tensor per bucket), as boxes of logical tensors."""
    for each in (each for each in owned if len(slices[each.bucket])):
        record = each.slot.record
        for box, elements, start in each.boxes():
            for at, sizes, first in boxes(elements.start, elements.stop, box.sizes):
                begin = start - elements.start + first
                offsets = tuple(outer + inner for outer, inner in zip(box.offsets, at, strict=True))
                tensor = slices[each.bucket][begin : begin + prod(sizes)].view(sizes)
                yield Piece(f"{prefix}{record.name}", record.shape, offsets, tensor)
