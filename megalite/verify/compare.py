"""Compares what ranks computed with what one process did: every number, and every element of every tensor.

Each rank's boxes are compared to the same boxes of the reference's logical tensors, relative to the largest element of
that very tensor: a small one cannot hide behind its neighbours. The boxes of all ranks must cover them: a parameter
that nobody holds is a difference, too. No torch import.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import numpy.typing as npt

RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64
NUMBERS = ("tokens in the loss", "loss", "gradient norm")
ROUTING = ("tokens of experts", "losses of routers")  # with experts: what they count on all ranks
GROUPS = ("embedding", "attention", "mlp", "router", "experts", "shared", "norms", "head")
ORDER = [
    *NUMBERS,
    *ROUTING,
    *(f"{kind}: {group}" for kind in ("gradients", "parameters") for group in GROUPS),
]  # others follow

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TensorBox:
    """A box of logical tensor `name`, of `shape`: what starts at `offsets`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Array

    def of(self, logical: Array) -> Array:
        """The same box of another tensor of the logical shape."""
        box = tuple(slice(at, at + size) for at, size in zip(self.offsets, self.values.shape, strict=True))
        return logical[box]


@dataclass(frozen=True)
class Trace:
    """What one process computed, of each tensor the boxes that it holds."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    gradients: list[list[TensorBox]]  # of each step, after all sums over ranks and before clipping
    parameters: list[TensorBox]  # after the last step
    routing: list[tuple[Array, Array]] = field(default_factory=list)  # of each step, as ROUTING names it; dense: none

    @property
    def numbers(self) -> tuple[Sequence[float], ...]:
        """Those of each step, as NUMBERS names them."""
        return self.tokens, self.losses, self.grad_norms


@dataclass(frozen=True)
class Row:
    """The worst difference of one kind. `scale` is what it is relative to: the reference's number, or the largest
    element of the parameter at `where`."""

    what: str
    scale: float
    difference: float
    where: str

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale else self.difference

    @property
    def excess(self) -> float:
        """The difference over its bound; what is not a number is infinitely far off."""
        excess = self.difference / (RELATIVE * self.scale + ABSOLUTE)
        return excess if isfinite(excess) else float("inf")

    @property
    def passed(self) -> bool:
        return self.excess <= 1


def compare(traces: Sequence[Trace], reference: Trace) -> list[Row]:
    """The worst of each kind over all ranks and steps. `traces` are in order of rank."""
    rows = []
    for rank, trace in enumerate(traces):
        for what, numbers, expected in zip(NUMBERS, trace.numbers, reference.numbers, strict=True):
            for step, (mine, theirs) in enumerate(zip(numbers, expected, strict=True), 1):
                rows.append(Row(what, abs(theirs), abs(mine - theirs), f"step {step}, rank {rank}"))
        for step, (found, wanted) in enumerate(zip(trace.routing, reference.routing, strict=True), 1):
            for what, own, its in zip(ROUTING, found, wanted, strict=True):
                rows.append(Row(what, float(its.max()), float(np.abs(own - its).max()), f"step {step}, rank {rank}"))
    for step, gradients in enumerate(reference.gradients, 1):
        rows += _tensors("gradients", f", step {step}", [trace.gradients[step - 1] for trace in traces], gradients)
    rows += _tensors("parameters", "", [trace.parameters for trace in traces], reference.parameters)
    worst: dict[str, Row] = {}
    for row in rows:
        if row.what not in worst or row.excess > worst[row.what].excess:
            worst[row.what] = row
    return sorted(worst.values(), key=lambda row: ORDER.index(row.what) if row.what in ORDER else len(ORDER))


def group_of(name: str) -> str:
    """The part of the model that a parameter belongs to: embedding, attention, mlp, router, experts, norms, ..."""
    parts = name.split(".")
    if any(part.endswith("norm") for part in parts):
        return "norms"
    if parts[0] == "blocks":
        return parts[3] if parts[2] == "moe" else parts[2]
    return parts[0]


def _tensors(
    kind: str, when: str, held: Sequence[Sequence[TensorBox]], expected_parts: Sequence[TensorBox]
) -> Iterator[Row]:
    """A row for each part that a rank holds, and one for each tensor of which some element is on no rank."""
    expected: dict[str, Array] = {}
    for part in expected_parts:
        part.of(expected.setdefault(part.name, np.full(part.shape, np.nan)))[...] = part.values
    scales = {name: float(np.abs(logical).max()) for name, logical in expected.items()}
    covered = {name: np.zeros(logical.shape, dtype=bool) for name, logical in expected.items()}
    for rank, parts in enumerate(held):
        for part in parts:
            difference = float(np.abs(part.values - part.of(expected[part.name])).max())
            part.of(covered[part.name])[...] = True
            where = f"{part.name}{when}, rank {rank}"
            yield Row(f"{kind}: {group_of(part.name)}", scales[part.name], difference, where)
    for name, cover in covered.items():
        if not cover.all():
            yield Row(f"{kind}: {group_of(name)}", scales[name], float("inf"), f"some of {name} on no rank")
