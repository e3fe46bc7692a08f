"""Sizes that transfer: how start values, learning rates and eps follow width and depth (muP, CompleteP).

A model that is `width` times as wide and `depth` times as deep as its base learns as the base does: activations, and
what a step changes of them, keep their size (Yang et al. 2022, arXiv 2203.03466; depth: Dey et al. 2025, 2505.01618).
What these papers put into the forward pass is folded into the factors here, so no product has a multiplier and a model
is exported as any other. A weight c w, of which w is trained, is itself trained by c times w's start and rate, 1 / c of
its eps and its decay. A step takes the same share of a weight for decay in every size: decay is over the rate's factor.
eps is as large as the gradients beside it. No torch import.
"""

from collections.abc import Callable, Iterator
from math import sqrt
from typing import NamedTuple

from megalite.config.schema import ModelConfig, MuonConfig
from megalite.errors.problems import plain
from megalite.layout.parameters import ParameterRecord, Role


class Factors(NamedTuple):
    """What a parameter's start values, its learning rate and its eps are multiplied by."""

    start: float = 1.0
    rate: float = 1.0
    eps: float = 1.0


# Functions of width w and depth d. The residual stream takes 1 / d of each block, the logits 1 / w of the head.
TABLE: dict[Role, Callable[[float, float], Factors]] = {
    "input": lambda w, _: Factors(eps=1 / w),
    "hidden": lambda w, d: Factors(1 / sqrt(w), 1 / w, 1 / (w * d)),
    "residual": lambda w, d: Factors(1 / (sqrt(w) * d), 1 / (w * d), 1 / w),
    "residual_bias": lambda w, d: Factors(1 / d, 1 / d, 1 / w),
    "vector": lambda w, d: Factors(eps=1 / (w * d)),
    "shared": lambda _, d: Factors(eps=1 / d),
    "router": lambda w, d: Factors(1 / w, 1 / w, 1 / d),
    "output": lambda w, _: Factors(1 / w, 1 / w),
}
# What Muon multiplies the orthogonalised update of a matrix by, by its rows (outputs), columns and optimizer.muon.rms.
SCALES: dict[str, Callable[[float, float, float], float]] = {
    "match_adamw": lambda rows, columns, rms: rms * sqrt(max(rows, columns)),
    "max_ratio": lambda rows, columns, _: sqrt(max(1.0, rows / columns)),
    "ratio": lambda rows, columns, _: sqrt(rows / columns),
}


def growth(model: ModelConfig) -> tuple[float, float]:
    """How many times as wide and as deep as its base the model is; 1 where there is none."""
    width = model.hidden_size / model.mup_base_width if model.mup_base_width else 1.0
    return width, model.num_layers / model.mup_base_layers if model.mup_base_layers else 1.0


def factors_of(role: Role, model: ModelConfig) -> Factors:
    """The row of the table."""
    return TABLE[role](*growth(model))


def muon_factor(record: ParameterRecord, model: ModelConfig, muon: MuonConfig) -> float:
    """What Muon's rate of a matrix is multiplied by, that an update's largest singular value follows sqrt(outputs /
    inputs) as the model grows (Yang et al. 2023, arXiv 2310.17813). The outputs of routers and heads do not grow."""
    (width, depth), (rows, columns) = growth(model), record.shape[-2:]
    fixed = record.role == "router" or (record.heads and muon.qkv == "head")

    def wanted(rows: float, columns: float) -> float:
        return sqrt(rows / columns) / SCALES[muon.scale](rows, columns, muon.rms)

    at_base = wanted(rows if fixed else rows / width, columns / width)
    return wanted(rows, columns) / at_base / (depth if record.role == "residual" else 1.0)


def lines_of_scaling(model: ModelConfig) -> Iterator[str]:
    """What a run says of its size."""
    if model.mup_base_width or model.mup_base_layers:
        width, depth = map(plain, growth(model))
        yield (
            f"{width} times as wide and {depth} times as deep as the base: start values, rates, eps and decay of each "
            "parameter follow (docs/mup.md), and rates are told as the base has them"
        )
