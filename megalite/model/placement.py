"""Where the tensors of a model live: dtype, device, and the ranks among which each layer is split."""

from dataclasses import dataclass
from typing import Any

import torch

from megalite.tensor_parallel.collectives import TensorGroup


@dataclass(frozen=True)
class Placement:
    """`tp` is None where layers are whole. With `sequence_parallel` activations between the layers are this rank's part
    of the sequence, [s/t, b, h]; else they are whole on every rank, [s, b, h]."""

    dtype: torch.dtype
    device: torch.device
    tp: TensorGroup | None = None
    sequence_parallel: bool = False

    @property
    def of_layers(self) -> dict[str, Any]:
        """Arguments of a tensor-parallel layer."""
        return {
            "dtype": self.dtype,
            "device": self.device,
            "group": self.tp,
            "sequence_parallel": self.sequence_parallel,
        }
