"""Tells whether a layout trains like one process: the user's config, made small, trained on real ranks and on one.

Both runs are real ones, in fp64 (running.py), and what they have written is compared, step by step and tensor by
tensor. metrics.jsonl has each step's loss, gradient norm and tokens. The first checkpoint has the gradients of step 1:
AdamW's first moment is then (1 - beta1) times the clipped gradient, Muon's momentum (1 - momentum) times. The last one
has the parameters. A tensor's difference is relative to the largest element of that very tensor: a small tensor cannot
hide behind its neighbours.
"""

import tempfile
import textwrap
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.commit import CHECKPOINTS
from megalite.checkpoint.manifest import DTYPES, Piece
from megalite.checkpoint.reading import newest
from megalite.config.layout import layout_of
from megalite.config.schema import Config, OptimizerConfig
from megalite.config.settings import value_of
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import header_lines
from megalite.optim.buffers import EMA
from megalite.train.history import METRICS, read_metrics
from megalite.verify.running import LAYOUT, SINGLE, TrainRank, train_both
from megalite.verify.shrink import shrink

RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64
SHOWN = (
    *(f"model.{name}" for name in ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")),
    *("model.vocab_size", "model.moe.num_experts", "train.seq_length", "train.global_batch_size", "train.compile"),
    "parallel.pipeline_layout",
)


class Row(NamedTuple):
    """The worst difference of one kind. `scale` is what it is relative to: the number of the one process, or the
    largest element of its tensor at `where`."""

    what: str
    scale: float
    difference: float
    excess: float  # the difference over its bound; infinite for what is not a number
    where: str


def verify(config: Config, world_size: int, train: TrainRank, timeout_s: float) -> tuple[list[str], bool]:
    """The lines that a user reads, and whether all is equal. `config` is derived and checked for `world_size` ranks.

    `train` trains one rank as users do. A process that fails or hangs raises RunFailure.
    """
    small, layout, reference = shrink(config, world_size)
    changed = [f"{name}={value_of(small, name)}" for name in SHOWN if value_of(small, name) != value_of(config, name)]
    lines = [f"asked   {header_lines(layout_of(config, world_size))[0]}; model={config.model.name}"]
    lines += [f"run     {header_lines(layout)[0]}; in fp64 on the CPU, on random tokens, with"]
    lines += textwrap.wrap(" ".join(changed), 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as name:
        folder, ranks = Path(name), layout.world_size
        train_both(small, ranks, reference, folder, timeout_s, train)
        rows = compare(folder / LAYOUT, folder / SINGLE, small.optimizer)
    lines += ["", f"{'':24}{'one process':>12}{'difference':>12}{'relative':>10}        worst at"]
    for row in rows:
        numbers = f"{row.scale:>12.6g}{row.difference:>12.1e}{row.difference / (row.scale or 1):>10.1e}"
        lines.append(f"{row.what:24}{numbers}  {'pass' if row.excess <= 1 else 'FAIL'}  {row.where}")
    bound, failed = f"{RELATIVE:g} relative or {ABSOLUTE:g} absolute", sum(row.excess > 1 for row in rows)
    verdict = f"PASS: {ranks} ranks train like one process, within {bound}"
    if failed:
        verdict = f"FAIL: {failed} of {len(rows)} rows differ from one process by more than {bound}"
    return [*lines, "", verdict], not failed


def compare(layout: Path, single: Path, optimizer: OptimizerConfig) -> list[Row]:
    """The worst difference of each kind between the run folder of a layout and that of one process."""
    rows, (records, expected) = list[Row](), [read_metrics(run / METRICS) for run in (layout, single)]
    for record, other in zip(records, expected, strict=True):
        numbers, wanted = _numbers(record), _numbers(other)
        rows += [_row(name, numbers[name], wanted[name], f"step {other['step']}") for name in wanted]
    clipped = max(1.0, expected[0]["grad_norm"] / optimizer.clip_grad) if optimizer.clip_grad else 1.0
    kept = {"exp_avg": optimizer.betas[0], "momentum": optimizer.muon.momentum}
    factors = {moment: clipped / (1 - share) for moment, share in kept.items()}
    for kind, step in (("gradients", expected[0]["step"]), ("parameters", expected[-1]["step"])):
        found, wanted = (_tensors(run, step, kind, factors) for run in (layout, single))
        nothing = torch.tensor(float("nan"))
        for name in sorted(found.keys() | wanted.keys()):
            tensors = found.get(name, nothing), wanted.get(name, nothing)
            rows.append(_row(f"{kind}: {group_of(name)}", *tensors, f"{name}, step {step}"))
    kinds = dict.fromkeys(row.what for row in rows)
    return [max((row for row in rows if row.what == what), key=lambda row: row.excess) for what in kinds]


def group_of(name: str) -> str:
    """The part of the model that a parameter belongs to: embedding, attention, mlp, router, experts, norms, ..."""
    parts = name.split(".")
    if any(part.endswith("norm") for part in parts):
        return "norms"
    return parts[0] if parts[0] != "blocks" else parts[3] if parts[2] == "moe" else parts[2]


def _numbers(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers of a step that no layout changes, by what they are."""
    numbers = {"tokens in the loss": record["tokens"], "loss": record["loss"], "gradient norm": record["grad_norm"]}
    if moe := record.get("moe"):
        numbers["tokens of experts"] = moe["tokens_per_expert"]
        numbers["losses of routers"] = [moe[name] for name in ("balancing_loss", "z_loss", "entropy")]
    if logits := record.get("layer_attention_logit"):
        numbers["attention logits"] = [*logits.values()]
    return {what: torch.tensor(value, dtype=torch.float64) for what, value in numbers.items()}


def _tensors(run: Path, step: int, kind: str, factors: Mapping[str, float]) -> dict[str, Tensor]:
    """The first moments in a checkpoint, multiplied by the factor of their kind, or masters, their averages and what
    balances routers."""
    found, read = newest(run / CHECKPOINTS, ParallelContext(), print, step=step), dict[str, Tensor]()
    assert found is not None
    for name, stored in found.manifest.tensors.items():
        of, _, parameter = name.partition(".")
        of_model = of in ("master", EMA, "blocks")
        is_moment = not of_model and of != "optimizer" and not of.endswith("_sq")
        if is_moment if kind == "gradients" else of_model:
            value = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
            read[name if of in (EMA, "blocks") else parameter] = value
            found.read_into([Piece(name, stored.shape, (0,) * value.dim(), value)], unread=name.__ne__)
            value *= factors.get(of, 1.0)
    return read


def _row(what: str, found: Tensor, expected: Tensor, where: str) -> Row:
    scale, difference = float(expected.abs().max()), float((found - expected).abs().max())
    excess = difference / (RELATIVE * scale + ABSOLUTE)
    return Row(what, scale, difference, excess if isfinite(excess) else float("inf"), where)
