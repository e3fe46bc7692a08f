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

from megalite.parallel.parameters import Shard

RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64
GROUPS = ("embedding", "attention", "mlp", "norms", "head")  # as rows are ordered; others follow

Arrays = dict[str, npt.NDArray[np.float64]]  # by logical name: what the rank holds of each parameter


@dataclass(frozen=True)
class Trace:
    """What one process computed. `shards` says where in the logical tensors its own ones belong."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    gradients: list[Arrays]  # of each step, after all sums over ranks and before clipping
    parameters: Arrays  # after the last step
    shards: dict[str, Shard]


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
    order = {group: place for place, group in enumerate(GROUPS)}
    groups = sorted(set(map(group_of, reference.parameters)), key=lambda group: (order.get(group, len(order)), group))
    for group in groups:
        rows.append(_worst(_gradients(group, traces, reference)))
    for group in groups:
        rows.append(_worst(_tensors("parameters", group, "", [t.parameters for t in traces], traces, reference)))
    missing = {group_of(name): name for name in _uncovered(traces, reference)}
    return rows + [Row(f"held: {group}", 0.0, float("inf"), f"{name} on no rank") for group, name in missing.items()]


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


def _gradients(group: str, traces: Sequence[Trace], reference: Trace) -> Iterator[Row]:
    for step, expected in enumerate(reference.gradients, 1):
        found = [trace.gradients[step - 1] for trace in traces]
        yield from _tensors("gradients", group, f", step {step}", found, traces, reference, expected)


def _tensors(
    kind: str,
    group: str,
    when: str,
    found: Sequence[Arrays],
    traces: Sequence[Trace],
    reference: Trace,
    expected: Arrays | None = None,
) -> Iterator[Row]:
    """One row for each parameter of the group and each rank that holds some of it."""
    expected = reference.parameters if expected is None else expected
    names = [name for name in expected if group_of(name) == group]
    scales = {name: float(np.abs(expected[name]).max()) for name in names}
    yield Row(f"{kind}: {group}", max(scales.values()), 0.0, "")
    for rank, (trace, arrays) in enumerate(zip(traces, found, strict=True)):
        for name in names:
            for box in trace.shards[name].boxes if name in trace.shards else ():
                difference = float(np.abs(arrays[name][box.local] - expected[name][box.logical]).max())
                yield Row(f"{kind}: {group}", scales[name], difference, f"{name}{when}, rank {rank}")


def _uncovered(traces: Sequence[Trace], reference: Trace) -> Iterator[str]:
    """Parameters of which the boxes of all ranks leave something out."""
    for name, array in reference.parameters.items():
        held = np.zeros(array.shape, dtype=bool)
        for trace in traces:
            for box in trace.shards[name].boxes if name in trace.shards else ():
                held[box.logical] = True
        if not held.all():
            yield name
