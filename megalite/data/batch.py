"""Defines the record of a microbatch: everything that the model reads about its input.

Nothing derives positions, masks or documents from a shape, so that an axis which splits the sequence only has to slice
these tensors.
"""

from collections.abc import Callable
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
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The same batch in memory that a GPU copies from without anybody waiting."""
        return self._with(Tensor.pin_memory)

    def _with(self, moved: Callable[[Tensor], Tensor]) -> "Batch":
        """A row that was expanded is moved once, and stays one: what follows from positions is then computed once."""
        found: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in found.items():
            if isinstance(value, Tensor):
                found[name] = moved(value) if value.stride(0) else moved(value[:1]).expand_as(value)
        return Batch(**found)


def unscored(tokens: Tensor) -> Batch:
    """`tokens` [b, s] as a microbatch of which nothing enters the loss."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return Batch(tokens, torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool), positions, None, 0)
