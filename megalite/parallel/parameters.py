"""Parameters know who they are: one record per logical parameter of the model.

A record holds what is true of the parameter whatever the layout: its logical (unsharded) name and shape, how it starts
and whether weight decay touches it. Initialisation, optimizer groups, checkpoints and imports all ask these records;
nothing is stuck onto tensors. No torch import.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class ParameterRecord:
    """One logical parameter.

    `name` carries the global layer index (`blocks.11.mlp.up.weight`) and is also the name of the `torch.nn.Parameter`
    in a module that holds the whole model. `std` is the standard deviation of a `normal` start, unused otherwise.
    """

    name: str
    shape: tuple[int, ...]
    init: Literal["normal", "zeros", "ones"]
    std: float
    decay: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)
