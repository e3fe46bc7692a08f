"""Compares two runs of the same training, step by step and tensor by tensor, by what they have written.

metrics.jsonl has each step's loss, gradient norm and tokens. The first checkpoint has the gradients of step 1: AdamW's
first moment is then (1 - beta1) times the clipped gradient. The last one has the parameters. A tensor's difference is
relative to the largest element of that very tensor: a small tensor cannot hide behind its neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.commit import CHECKPOINTS
from megalite.checkpoint.manifest import DTYPES
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.store import of_step
from megalite.config.schema import OptimizerConfig
from megalite.launch.context import ParallelContext
from megalite.train.history import METRICS, read_metrics

RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64
NUMBERS = {"tokens in the loss": "tokens", "loss": "loss", "gradient norm": "grad_norm"}  # and their field
ROUTING = {"tokens of experts": ("tokens_per_expert",), "losses of routers": ("balancing_loss", "z_loss", "entropy")}
GROUPS = ("embedding", "attention", "mlp", "router", "experts", "shared", "norms", "head")
OF_THE_MODEL = ("master", "blocks")  # masters, and what balances routers, by the first part of a checkpoint's names
ORDER = [*NUMBERS, *ROUTING, *(f"{kind}: {group}" for kind in ("gradients", "parameters") for group in GROUPS)]


@dataclass(frozen=True)
class Row:
    """The worst difference of one kind. `scale` is what it is relative to: the number of the one process, or the
    largest element of its tensor at `where`."""

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


def compare(layout: Path, single: Path, optimizer: OptimizerConfig) -> list[Row]:
    """The worst difference of each kind between the run folder of a layout and that of one process."""
    records, expected = (read_metrics(run / METRICS) for run in (layout, single))
    rows = [row for pair in zip(records, expected, strict=True) for row in _numbers(*pair)]
    clipped = max(1.0, expected[0]["grad_norm"] / optimizer.clip_grad) if optimizer.clip_grad else 1.0
    first, last = expected[0]["step"], expected[-1]["step"]
    for step, kind, factor in ((first, "gradients", clipped / (1 - optimizer.betas[0])), (last, "parameters", 1.0)):
        rows += _tensors(kind, *(_read(run, step, kind, factor) for run in (layout, single)), f", step {step}")
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


def _numbers(record: dict[str, Any], expected: dict[str, Any]) -> Iterator[Row]:
    """A row for each number of a step."""
    pairs = [(what, record[name], expected[name]) for what, name in NUMBERS.items()]
    if "moe" in expected:
        pairs += [
            (what, [record["moe"][name] for name in names], [expected["moe"][name] for name in names])
            for what, names in ROUTING.items()
        ]
    for what, *values in pairs:
        found, wanted = (torch.tensor(value, dtype=torch.float64) for value in values)
        yield _row(what, found, wanted, f"step {expected['step']}")


def _read(run: Path, step: int, kind: str, factor: float) -> dict[str, Tensor]:
    """The gradients or parameters (what balances routers without a gradient included) in a checkpoint, by name."""
    found, read = of_step(run / CHECKPOINTS, step, ParallelContext()), dict[str, Tensor]()
    for name, stored in found.manifest.tensors.items():
        of, _, parameter = name.partition(".")
        is_moment = of not in (*OF_THE_MODEL, "optimizer") and not of.endswith("_sq")
        if is_moment if kind == "gradients" else of in OF_THE_MODEL:
            value = read[name if of == "blocks" else parameter] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
            pieces = [Piece(name, stored.shape, (0,) * value.dim(), value)]
            found.read_into(pieces, unread=name.__ne__)
            value *= factor
    return read


def _tensors(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor], when: str) -> Iterator[Row]:
    """A row for each tensor; one that only one of the runs has is infinitely far off."""
    for name in found.keys() | expected.keys():
        nothing = torch.tensor(float("nan"))
        yield _row(f"{kind}: {group_of(name)}", found.get(name, nothing), expected.get(name, nothing), f"{name}{when}")


def _row(what: str, found: Tensor, expected: Tensor, where: str) -> Row:
    return Row(what, float(expected.abs().max()), float((found - expected).abs().max()), where)
