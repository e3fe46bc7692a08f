"""Tensor and sequence parallelism compute what one process computes, in fp64, and a broken one is caught."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.optim.buffers import BufferLayout
from megalite.optim.partial import PartialGradients
from megalite.parallel.context import ParallelContext
from megalite.parallel.groups import GroupNeeds
from megalite.parallel.layout import ParallelLayout
from megalite.tensor_parallel import linear as linear_module
from tests.layouts.reference import reference
from tests.layouts.training import Trace, assert_same_training, train
from tests.ranks import run_ranks

RAGGED = {"data": {"mask_end_of_document": True, "cross_document_attention": False}}
SMOOTHED = {"train": {"label_smoothing": 0.1, "z_loss": 1e-3}}
DROPPED = {"model": {"dropout": 0.1, "attention_dropout": 0.0, "embedding_dropout": 0.2}}  # hashes know no layout
UNEVEN = {"model": {"vocab_multiple": 7}}  # 257 tokens in 259 rows
FULL = {"train": {"recompute": "full"}}
SELECTIVE = {"train": {"recompute": "selective", "recompute_modules": ["attention", "norm", "activation"]}}
Row = tuple[int, int, bool, str, dict[str, dict[str, Any]]]  # tp, dp, sequence parallel, family, overrides
ROWS: list[Row] = [
    (2, 1, True, "gpt2", {}),
    (2, 1, False, "gpt2", RAGGED),
    (4, 1, True, "llama", UNEVEN),  # two key-value heads for four ranks
    (4, 1, False, "llama", SMOOTHED),
    (2, 2, True, "llama", RAGGED),
    (4, 1, True, "qwen3", SELECTIVE),
    (2, 1, False, "qwen3", FULL),
    (2, 1, True, "gpt2", FULL),
    (2, 2, False, "gpt2", SELECTIVE),
    (2, 2, True, "gpt2", DROPPED),
    (4, 1, False, "llama", DROPPED),
]
COMPILED: list[Row] = [
    (2, 1, True, "llama", {"train": {"compile": True}}),
    (2, 1, False, "gpt2", {"train": {"compile": True, **SELECTIVE["train"]}}),
]
LONG_ROWS: list[Row] = COMPILED + [
    (tp, dp, sequence_parallel, family, {**changes, "train": {**changes.get("train", {}), **recompute["train"]}})
    for tp in (2, 4)
    for dp in (1, 2)
    for sequence_parallel in (False, True)
    for family in ("gpt2", "llama", "qwen3")
    for changes in (RAGGED, {**SMOOTHED, **UNEVEN})
    for recompute in ({"train": {"recompute": "none"}}, SELECTIVE, FULL)
]


def train_rows(workplace: tuple[Path, Path], row: Row, function: Any = train) -> tuple[list[Trace], Trace]:
    """Traces of all ranks, and of the single process."""
    tp, dp, sequence_parallel, family, overrides = row
    config, expected = reference(workplace, family, overrides)
    assert min(expected.grad_norms) > 10 * config.optimizer.clip_grad, "clipping is part of what is compared"
    config = replace(config, parallel=replace(config.parallel, tp=tp, sequence_parallel=sequence_parallel))
    needs = GroupNeeds(tied_embeddings=config.model.tie_embeddings, kv_heads=config.model.num_key_value_heads)
    layout = ParallelLayout(tp=tp, dp=dp)
    return run_ranks(function, tp * dp, config, dtype=torch.float64, layout=layout, needs=needs, timeout=240), expected


def check_row(workplace: tuple[Path, Path], row: Row) -> None:
    assert_all_same(*train_rows(workplace, row))


def assert_all_same(traces: list[Trace], expected: Trace) -> None:
    for trace in traces:
        assert_same_training(trace, expected)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ranks_train_like_one_process(workplace: tuple[Path, Path], row: Row) -> None:
    check_row(workplace, row)


@pytest.mark.long
@pytest.mark.parametrize("row", LONG_ROWS, ids=str)
def test_ranks_train_like_one_process_everywhere(workplace: tuple[Path, Path], row: Row) -> None:
    check_row(workplace, row)


def _without_input_gradient_sum(context: ParallelContext, config: Config) -> Trace:
    linear_module.start_all_reduce = lambda x, group, op="sum": x.clone()
    return train(context, config)


def _without_sum_of_partial_gradients(context: ParallelContext, config: Config) -> Trace:
    PartialGradients.sum = lambda self: None  # type: ignore[method-assign]
    return train(context, config)


def _counting_replicas_on_every_rank(context: ParallelContext, config: Config) -> Trace:
    BufferLayout.counted = lambda self, buffer: [buffer]  # type: ignore[method-assign]
    return train(context, config)


def _drawing_the_same_shard_everywhere(context: ParallelContext, config: Config) -> Trace:
    index = ParallelContext.index
    ParallelContext.index = lambda self, name: 0 if name == "tp" else index(self, name)  # type: ignore[method-assign]
    return train(context, config)


@pytest.mark.parametrize(
    ("mutant", "row"),
    [
        (_without_input_gradient_sum, (2, 1, False, "llama", {})),
        (_without_sum_of_partial_gradients, (2, 1, True, "llama", {})),
        (_without_sum_of_partial_gradients, (4, 1, False, "llama", {})),  # shared key-value heads
        (_without_sum_of_partial_gradients, (2, 1, False, "qwen3", {})),  # norms over heads
        (_counting_replicas_on_every_rank, (2, 1, False, "gpt2", {})),
        (_drawing_the_same_shard_everywhere, (2, 1, False, "llama", {})),
    ],
)
def test_a_broken_layout_is_caught(workplace: tuple[Path, Path], mutant: Any, row: Row) -> None:
    traces, expected = train_rows(workplace, row, mutant)
    with pytest.raises(AssertionError):
        assert_all_same(traces, expected)


def test_shards_of_one_weight_differ_and_make_up_the_single_process_s(workplace: tuple[Path, Path]) -> None:
    """Elsewhere a silent mistake: every rank draws the same shard."""
    row: Row = (4, 1, True, "llama", {})
    traces, _ = train_rows(workplace, row, _start)
    (expected,) = [_start(ParallelContext(dtype=torch.float64), reference(workplace, "llama", {})[0])]
    name = "blocks.1.mlp.gate_up.weight"
    parts = [start[name] for start, _ in traces]
    assert not any(torch.equal(one, other) for at, one in enumerate(parts) for other in parts[:at])
    for start, shards in traces:
        for each, shard in shards.items():
            for box in shard.boxes:
                assert torch.equal(start[each][box.local], expected[0][each][box.logical])
    assert torch.equal(torch.cat(parts, dim=1), expected[0][name])


def _start(context: ParallelContext, config: Config) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Masters before the first step, and where they belong."""
    trace = train(context, config, steps=0)
    return trace.parameters, trace.shards
