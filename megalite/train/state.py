"""What a checkpoint holds: named logical tensors and a handful of numbers.

Masters, both moments and (where they differ from the masters) parameters, each under its logical name; learning rate,
data order and dropout masks are functions of the step, so the step is all there is besides.
"""

from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.pieces import Piece
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffers import TrainingBuffers

ROUNDED = "parameter"  # kind of the tensors that are masters in the model's dtype: a resume rounds them anew


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0  # optimizer steps done, skipped ones included
    samples: int = 0  # consumed: the whole state of the data
    tokens: int = 0  # unmasked tokens trained on
    bad_steps: int = 0  # steps that were skipped, in all
    bad_steps_in_a_row: int = 0

    def as_state(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        return cls(**state)


def training_pieces(buffers: TrainingBuffers, optimizer: FlatAdamW) -> list[Piece]:
    """Every tensor that a resumed run needs, as pieces over the live buffers."""
    flats = {"master": buffers.masters, "exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    if buffers.parameters is not buffers.masters:
        flats[ROUNDED] = buffers.parameters
    pieces = [
        Piece(f"{kind}.{slot.record.name}", slot.record.shape, box.offsets, slot.view(flat)[box.local])
        for kind, flat in flats.items()
        for slot in buffers.layout.slots
        for box in slot.shard.boxes
    ]
    return [*pieces, Piece("optimizer.step", (1,), (0,), optimizer.step_count.view(1))]
