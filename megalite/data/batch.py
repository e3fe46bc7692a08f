"""Defines the record of a microbatch: everything that the model reads about its input.

Nothing derives positions, masks or documents from a shape: context parallelism only slices these tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.layout.sequence import AttentionPlan, CpShard, causal_plan, document_plan, starts_of


@dataclass(frozen=True)
class Batch:
    """One microbatch of `b` sequences, of which a rank has `n` of the `s` tokens (all, without context parallelism).

    `documents` numbers the document of each token within its sequence, for attention that stays inside documents; None
    means that a token attends to every earlier token of its sequence. Dropout masks are derived from `samples`. `plan`:
    which scores this rank computes where the ranks of a ring share them.
    """

    tokens: Tensor  # [b, n], int64
    labels: Tensor  # [b, n], int64
    loss_mask: Tensor  # [b, n], bool: True where the token counts in the loss
    positions: Tensor  # [b, n], int64, or [1, n] where they are the same in all sequences
    places: Tensor  # [n], int64: where in the sequence
    counted: Tensor  # [b], int64: labels of the whole sequence that count in the loss
    documents: Tensor | None  # [b, s], int32: of the whole sequence
    samples: Tensor  # [b], int64: the number of each sequence in the run
    length: int  # s
    plan: AttentionPlan | None = None
    sources: Tensor | None = None  # [b], int64: which part of a blend each sequence is from; None: no blend

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; asynchronous where the source is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `change` of each of its tensors."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **changed)

    def fill(self, other: "Batch") -> None:
        """Copy the numbers of another batch of the same shape into this batch's tensors."""
        given = other._tensors()
        for name, own in self._tensors().items():
            own.copy_(given[name], non_blocking=True)

    def with_mask(self, loss_mask: Tensor) -> "Batch":
        """The same whole sequences with another `loss_mask` [b, s]."""
        return replace(self, loss_mask=loss_mask, counted=loss_mask.sum(1))

    def part(self, share: CpShard) -> "Batch":
        """The tokens of a whole batch on the CPU that one rank of cp holds."""
        if share == CpShard():
            return self
        plan: AttentionPlan | None = None
        if share.ring > 1:
            apart = self.documents
            plan = causal_plan(share, self.length) if apart is None else document_plan(share, starts_of(apart.numpy()))
        index = torch.from_numpy(share.places(self.length, "zigzag" if plan is None else plan.cut))
        names = ("tokens", "labels", "loss_mask", "positions", "places")
        parts: dict[str, Any] = {name: getattr(self, name)[..., index] for name in names}
        return replace(self, **parts, plan=plan)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def whole_batch(
    tokens: Tensor, labels: Tensor, loss_mask: Tensor, positions: Tensor, documents: Tensor | None, first_sample: int
) -> Batch:
    """A microbatch of whole sequences, from tensors [b, s]; `positions` may be one row that is expanded to b."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    positions = positions if positions.stride(0) else positions[:1]
    samples = torch.arange(first_sample, first_sample + len(tokens), device=tokens.device)
    counted = loss_mask.sum(1)
    return Batch(tokens, labels, loss_mask, positions, places, counted, documents, samples, tokens.shape[1])


def unscored(tokens: Tensor) -> Batch:
    """`tokens` [b, s] as a microbatch without a label that enters the loss."""
    positions, nothing = torch.arange(tokens.shape[1], device=tokens.device)[None], torch.zeros_like(tokens)
    return whole_batch(tokens, nothing, nothing.bool(), positions, None, 0)
