"""One row of the matrix: what a model trains with, and the layout in which it must train like a single process."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.prepare.prepare import prepare
from megalite.train.build import needs_of
from tests.layouts.mutants import Mutant
from tests.layouts.training import GLOBAL_BATCH, Overrides, Trace, assert_same_training, merged, small_config, train
from tests.ranks import run_ranks

RAGGED = {"data": {"mask_end_of_document": True, "cross_document_attention": False}}
FULL = {"train": {"recompute": "full"}}
SELECTIVE = {"train": {"recompute": "selective", "recompute_modules": ["attention", "norm", "activation"]}}
DROPPED = {"model": {"dropout": 0.1, "attention_dropout": 0.3, "embedding_dropout": 0.2}}  # hashes know no layout
FOUR = {"model": {"num_layers": 4}}
# Settings of the optimizer that are part of the training.
RULES = ("name", "muon", "groups", "qk_clip", "ema_half_life_steps", "weight_decay_schedule", "cautious")
FEW = {"optimizer": {"bucket_size": 6000}}  # a block and a half: it ends at the block

Workplace = tuple[Path, Path]  # a text and a cache folder


@dataclass(frozen=True)
class Row:
    """A family of models, settings by section, and data-parallel replicas of `parallel`'s settings."""

    family: str
    settings: Overrides
    dp: int
    parallel: dict[str, Any]

    @property
    def layout(self) -> ParallelLayout:
        axes = {
            axis: size
            for axis, size in self.parallel.items()
            if axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "order")
        }
        if "moe" in self.settings.get("model", {}):
            axes.setdefault("etp", self.parallel.get("tp", 1))
        return ParallelLayout(dp=self.dp, **axes)

    def config(self, workplace: Workplace) -> Config:
        """Unless the row says otherwise, each replica accumulates over two microbatches (of 4, over three)."""
        usual = {"train": {"micro_batch_size": max(1, GLOBAL_BATCH // 2 // self.dp)}, "parallel": self.parallel}
        return small_config(*workplace, self.family, self.layout.world_size, **merged(usual, self.settings))

    def reference(self, workplace: Workplace) -> Trace:
        """What a single process computes, which keeps all activations of the whole batch; with experts, of the row's
        microbatches, which balancing losses and capacities know."""
        settings = {name: values for name, values in self.settings.items() if name != "optimizer"}
        rule = {name: value for name, value in self.settings.get("optimizer", {}).items() if name in RULES}
        settings |= {"optimizer": rule} if rule else {}
        plain = {"recompute": "none", "compile": False}
        if "moe" in settings.get("model", {}):
            plain["micro_batch_size"] = self.config(workplace).train.micro_batch_size
        elif "batch_ramp" not in settings.get("train", {}):
            plain["micro_batch_size"] = GLOBAL_BATCH
        trace = _reference(workplace, self.family, json.dumps(merged(settings, {"train": plain})))
        assert min(trace.grad_norms) > 10 * self.config(workplace).optimizer.clip_grad, "clipping is compared, too"
        assert (len(set(trace.tokens)) > 1) == ("data" in settings), "a ragged mask changes the number of tokens"
        return trace

    def __str__(self) -> str:
        sizes = [f"dp={self.dp}"] * (self.dp > 1) + [f"{name}={value}" for name, value in self.parallel.items()]
        usual = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coeff": 0.1, "z_loss_coeff": 0.01}
        values = {name: value for values in self.settings.values() for name, value in values.items()}
        if "moe" in values:  # without what is the same in all
            values["moe"] = {name: value for name, value in values["moe"].items() if usual.get(name) != value}
        settings = [f"{name}={value}" for name, value in values.items()]
        return " ".join([self.family, *sizes, *settings])


def row(family: str, *settings: Overrides, dp: int = 1, **parallel: Any) -> Row:
    return Row(family, merged(*settings), dp, parallel)


def rows_of(usual: Sequence[Row], long: Sequence[Row]) -> pytest.MarkDecorator:
    """Parametrise by `row`; those of `long` are of a full run."""
    marked = [pytest.param(row, marks=pytest.mark.long) for row in long]
    return pytest.mark.parametrize("row", [*usual, *marked], ids=_named)


def mutants_of(usual: Sequence[tuple[Mutant, Row]], long: Sequence[tuple[Mutant, Row]] = ()) -> pytest.MarkDecorator:
    """Parametrise by `mutant` and `row`."""
    marked = [pytest.param(*pair, marks=pytest.mark.long) for pair in long]
    return pytest.mark.parametrize(("mutant", "row"), [*usual, *marked], ids=_named)


def _named(part: Any) -> str:
    return getattr(part, "__name__", None) or str(part)


def assert_equal(workplace: Workplace, row: Row) -> None:
    """The ranks of the row train like one process."""
    assert_same_training(train_row(workplace, row), row.reference(workplace))


def assert_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    """Ranks with one mistake do not."""
    traces, expected = train_row(workplace, row, partial(train_broken, mutant)), row.reference(workplace)
    with pytest.raises(AssertionError):
        assert_same_training(traces, expected)


def train_broken(mutant: Mutant, context: ParallelContext, config: Config) -> Trace:
    """Train with the mistake."""
    mutant(context, config)
    return train(context, config)


def train_row(workplace: Workplace, row: Row, function: Any = train) -> list[Any]:
    """What `function` returns on each rank of the row's layout: traces of its training."""
    config, layout = row.config(workplace), row.layout
    prepare(config)  # else each rank would
    if layout.world_size == 1:
        return [function(ParallelContext(dtype=torch.float64), config)]
    needs = needs_of(config)
    return run_ranks(function, layout.world_size, config, dtype=torch.float64, layout=layout, needs=needs, timeout=240)


@cache
def _reference(workplace: Workplace, family: str, overrides: str) -> Trace:
    config = small_config(*workplace, family, **json.loads(overrides))
    prepare(config)
    trace = train(ParallelContext(dtype=torch.float64), config)
    assert not dist.is_initialized()
    return trace
