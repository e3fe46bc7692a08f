"""Holds what ranks computed against what one process did: every number, and every element of every tensor.

Each rank's boxes are compared to the same boxes of the reference's logical tensors, relative to the largest element of
that very tensor: a small one cannot hide behind its neighbours. The boxes of all ranks must cover them: a parameter
that nobody holds is a difference, too. No torch import.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64
GROUPS = ("embedding", "attention", "mlp", "norms", "head")  # as rows are ordered; others follow

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """The box of logical tensor `name`, of `shape`, that starts at `offsets`."""

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
    """What one process computed, of each tensor the parts that it holds."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    gradients: list[list[Part]]  # of each step, after all sums over ranks and before clipping
    parameters: list[Part]  # after the last step


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
    rows = [
        _worst(_numbers("tokens in the loss", [trace.tokens for trace in traces], reference.tokens)),
        _worst(_numbers("loss", [trace.losses for trace in traces], reference.losses)),
        _worst(_numbers("gradient norm", [trace.grad_norms for trace in traces], reference.grad_norms)),
    ]
    kinds = [
        *(
            (f", step {step}", "gradients", [trace.gradients[step - 1] for trace in traces], expected)
            for step, expected in enumerate(reference.gradients, 1)
        ),
        ("", "parameters", [trace.parameters for trace in traces], reference.parameters),
    ]
    found: dict[tuple[str, str], list[Row]] = {}
    for when, kind, held, expected in kinds:
        for group, row in _tensors(kind, when, held, assembled(expected)):
            found.setdefault((kind, group), []).append(row)
    order = {name: place for place, name in enumerate(["gradients", "parameters", *GROUPS])}
    ordered = sorted(found, key=lambda key: (order[key[0]], order.get(key[1], len(order)), key[1]))
    return rows + [_worst(iter(found[key])) for key in ordered]


def assembled(parts: Sequence[Part]) -> dict[str, Array]:
    """The logical tensors, by name; what no part covers is not a number."""
    whole: dict[str, Array] = {}
    for part in parts:
        part.of(whole.setdefault(part.name, np.full(part.shape, np.nan)))[...] = part.values
    return whole


def group_of(name: str) -> str:
    """The part of the model that a parameter belongs to: embedding, attention, mlp, norms, head, ..."""
    parts = name.split(".")
    if any(part.endswith("norm") for part in parts):
        return "norms"
    return parts[2] if parts[0] == "blocks" else parts[0]


def _worst(rows: Iterator[Row]) -> Row:
    return max(rows, key=lambda row: row.excess)


def _numbers(what: str, found: Sequence[Sequence[float]], reference: Sequence[float]) -> Iterator[Row]:
    for rank, numbers in enumerate(found):
        for step, (mine, theirs) in enumerate(zip(numbers, reference, strict=True), 1):
            yield Row(what, abs(theirs), abs(mine - theirs), f"step {step}, rank {rank}")


def _tensors(
    kind: str, when: str, held: Sequence[Sequence[Part]], expected: dict[str, Array]
) -> Iterator[tuple[str, Row]]:
    """By group, a row for each part that a rank holds, and one for each tensor of which nobody holds something."""
    scales = {name: float(np.abs(logical).max()) for name, logical in expected.items()}
    covered = {name: np.zeros(logical.shape, dtype=bool) for name, logical in expected.items()}
    for rank, parts in enumerate(held):
        for part in parts:
            difference = float(np.abs(part.values - part.of(expected[part.name])).max())
            part.of(covered[part.name])[...] = True
            where = f"{part.name}{when}, rank {rank}"
            yield group_of(part.name), Row(f"{kind}: {group_of(part.name)}", scales[part.name], difference, where)
    for name, cover in covered.items():
        if not cover.all():
            group = group_of(name)
            yield group, Row(f"{kind}: {group}", scales[name], float("inf"), f"some of {name} on no rank")
