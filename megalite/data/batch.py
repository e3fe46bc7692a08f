"""Defines the record of a microbatch: everything that the model reads about its input.

Nothing derives positions, masks or documents from a shape: context parallelism only slices these tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megalite.layout.sequence import AttentionPlan, CpShard, causal_plan, document_plan, starts_of


@dataclass(frozen=True)
class Batch:
    """One microbatch of `b` sequences, of which a rank holds `n` of the `s` tokens: all but with context parallelism.

    `documents` numbers the document of each token within its sequence, for attention that stays inside documents; None
    means that a token attends to every earlier token of its sequence. Row i is sample `first_sample + i` of the run:
    dropout masks are derived from it. `plan`: which scores this rank computes where the ranks of a ring share them.
    """

    tokens: Tensor  # [b, n], int64
    labels: Tensor  # [b, n], int64
    loss_mask: Tensor  # [b, n], bool: True where the token counts in the loss
    positions: Tensor  # [b, n], int64; maybe one row expanded, so not to be written
    places: Tensor  # [n], int64: where in the sequence
    counted: Tensor  # [b], int64: labels of the whole sequence that count in the loss
    documents: Tensor | None  # [b, s], int32: of the whole sequence
    first_sample: int
    length: int  # s
    plan: AttentionPlan | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; asynchronous where the source is pinned."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The same batch in memory that a GPU copies from without anybody waiting."""
        return self._with(Tensor.pin_memory)

    def clone(self) -> "Batch":
        """The same batch in memory of its own."""
        return self._with(torch.clone)

    def fill(self, other: "Batch") -> None:
        """Copy the numbers of another batch of the same shape into this batch's tensors."""
        for own, given in zip(self._stored(), other._stored(), strict=True):
            own.copy_(given, non_blocking=True)

    def with_mask(self, loss_mask: Tensor) -> "Batch":
        """The same whole sequences with another `loss_mask` [b, s]."""
        return replace(self, loss_mask=loss_mask, counted=loss_mask.sum(1))

    def part(self, share: CpShard) -> "Batch":
        """The tokens of a whole batch on the CPU that one rank of cp holds."""
        plan: AttentionPlan | None = None
        if share == CpShard():
            return self
        if share.ring > 1 and self.documents is None:
            plan = causal_plan(share, self.length)
        elif share.ring > 1 and self.documents is not None:
            plan = document_plan(share, starts_of(self.documents.numpy()))
        held = share.places(self.length, "zigzag" if plan is None else plan.cut)
        sliced: dict[str, Any] = {
            name: _columns(getattr(self, name), held)
            for name in ("tokens", "labels", "loss_mask", "positions", "places")
        }
        return replace(self, **sliced, plan=plan)

    def _stored(self) -> list[Tensor]:
        """All tensors; of an expanded one, only the single row that is stored."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [value if value.stride(0) else value[:1] for value in values if isinstance(value, Tensor)]

    def _with(self, moved: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply `moved` to all tensors. An expanded row is moved once and expanded again: rotary tables of one row of
        positions are then computed once."""
        found: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in found.items():
            if isinstance(value, Tensor):
                found[name] = moved(value) if value.stride(0) else moved(value[:1]).expand_as(value)
        return Batch(**found)


def whole_batch(
    tokens: Tensor, labels: Tensor, loss_mask: Tensor, positions: Tensor, documents: Tensor | None, first_sample: int
) -> Batch:
    """A microbatch of whole sequences, from tensors [b, s]."""
    length = tokens.shape[1]
    places = torch.arange(length, device=tokens.device)
    return Batch(tokens, labels, loss_mask, positions, places, loss_mask.sum(1), documents, first_sample, length)


def unscored(tokens: Tensor) -> Batch:
    """`tokens` [b, s] as a microbatch without a label that enters the loss."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    nothing = torch.zeros_like(tokens)
    return whole_batch(tokens, nothing, nothing.bool(), positions, None, 0)


def _columns(x: Tensor, ranges: Sequence[range]) -> Tensor:
    """Elements of the last dim. An expanded row stays an expanded row."""
    if not x.stride(0):
        return _columns(x[0], ranges).expand(len(x), -1)
    return torch.cat([x[..., each.start : each.stop : each.step] for each in ranges], dim=-1)
