"""One record per microbatch: everything that the model reads about its input.

Nothing derives positions, masks or documents from a shape, so that an axis which splits the sequence only has to slice
these tensors.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One microbatch of `b` sequences of `s` tokens. All tensors are [b, s].

    `documents` numbers the document of each token within its sequence, for attention that stays inside documents; None
    means that a token attends to every earlier token of its sequence. Row i is sample `first_sample + i` of the run:
    dropout masks are derived from it.
    """

    tokens: Tensor  # int64
    labels: Tensor  # int64
    loss_mask: Tensor  # bool: True where the token counts in the loss
    positions: Tensor  # int64; maybe one row expanded, so not to be written
    documents: Tensor | None  # int32
    first_sample: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; asynchronous where the source is pinned."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }
        return Batch(**moved)
