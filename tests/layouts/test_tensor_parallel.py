"""Tensor and sequence parallelism compute what one process computes, in fp64, and a broken one is caught."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.pieces import Piece
from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train.build import needs_of
from tests.layouts import mutants
from tests.layouts.reference import reference
from tests.layouts.training import Trace, assembled, assert_same_training, small_config, train
from tests.ranks import run_ranks

Overrides = dict[str, dict[str, Any]]
Mutant = Callable[[ParallelContext, Config], Trace]


def merged(*changes: Overrides) -> Overrides:
    """All of them: of each section, the later settings over the earlier."""
    together: Overrides = {}
    for overrides in changes:
        for section, values in overrides.items():
            together[section] = {**together.get(section, {}), **values}
    return together


RAGGED = {"data": {"mask_end_of_document": True, "cross_document_attention": False}}
SMOOTHED = {"train": {"label_smoothing": 0.1, "z_loss": 1e-3}}
DROPPED = {"model": {"dropout": 0.1, "attention_dropout": 0.3, "embedding_dropout": 0.2}}  # hashes know no layout
UNEVEN = {"model": {"vocab_multiple": 7}}  # 257 tokens in 259 rows
FULL = {"train": {"recompute": "full"}}
SELECTIVE = {"train": {"recompute": "selective", "recompute_modules": ["attention", "norm", "activation"]}}
COMPILE = {"train": {"compile": True}}
PLAIN = {"train": {"recompute": "none", "recompute_modules": ["attention"], "compile": False}}  # the single process
WIDE = {"train": {"micro_batch_size": 3}}  # fewer, larger collectives, for many ranks on few cores
Row = tuple[int, int, bool, str, Overrides]  # tp, dp, sequence parallel, family, overrides
ROWS: list[Row] = [
    (2, 1, True, "gpt2", {}),
    (2, 1, False, "gpt2", RAGGED),
    (4, 1, True, "llama", UNEVEN),  # two key-value heads for four ranks
    (4, 1, False, "llama", merged(SMOOTHED, WIDE)),
    (2, 2, True, "llama", RAGGED),
    (4, 1, True, "qwen3", merged(SELECTIVE, WIDE)),
    (2, 1, False, "qwen3", merged(FULL, WIDE)),
    (2, 1, True, "gpt2", merged(FULL, WIDE)),
    (2, 2, False, "gpt2", SELECTIVE),
    (2, 2, True, "gpt2", DROPPED),
    (4, 1, False, "llama", merged(DROPPED, WIDE)),
    (2, 1, True, "llama", merged(DROPPED, SELECTIVE)),
    (2, 1, False, "llama", merged(DROPPED, RAGGED)),
    (2, 1, True, "gpt2", merged(merged(DROPPED, FULL), WIDE)),
    (4, 2, True, "gpt2", merged(RAGGED, WIDE)),
    (4, 2, False, "llama", WIDE),
]
COMPILED: list[Row] = [
    (2, 1, True, "llama", merged(COMPILE, DROPPED)),
    (2, 1, False, "gpt2", merged(COMPILE, SELECTIVE)),
]
LONG_ROWS: list[Row] = COMPILED + [
    (tp, dp, sequence_parallel, family, merged(changes, recompute))
    for tp in (2, 4)
    for dp in (1, 2)
    for sequence_parallel in (False, True)
    for family in ("gpt2", "llama", "qwen3")
    for changes in (RAGGED, merged(SMOOTHED, UNEVEN))
    for recompute in ({}, SELECTIVE, FULL)
]


def layout_config(workplace: tuple[Path, Path], row: Row) -> Config:
    tp, _, sequence_parallel, family, overrides = row
    config = small_config(*workplace, family, **overrides)
    return replace(config, parallel=replace(config.parallel, tp=tp, sequence_parallel=sequence_parallel))


def train_rows(workplace: tuple[Path, Path], row: Row, function: Any = train) -> tuple[list[Trace], Trace]:
    """Traces of all ranks, and of the single process, which keeps everything and is not compiled."""
    tp, dp, _, family, overrides = row
    config = layout_config(workplace, row)
    _, expected = reference(workplace, family, merged(overrides, PLAIN))
    assert min(expected.grad_norms) > 10 * config.optimizer.clip_grad, "clipping is part of what is compared"
    layout, needs = ParallelLayout(tp=tp, dp=dp), needs_of(config)
    return run_ranks(function, tp * dp, config, dtype=torch.float64, layout=layout, needs=needs, timeout=240), expected


def check_row(workplace: tuple[Path, Path], row: Row) -> None:
    assert_same_training(*train_rows(workplace, row))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ranks_train_like_one_process(workplace: tuple[Path, Path], row: Row) -> None:
    check_row(workplace, row)


@pytest.mark.long
@pytest.mark.parametrize("row", LONG_ROWS, ids=str)
def test_ranks_train_like_one_process_everywhere(workplace: tuple[Path, Path], row: Row) -> None:
    check_row(workplace, row)


BROKEN: list[tuple[Mutant, Row]] = [
    (mutants.no_sum_of_input_gradients, (2, 1, False, "llama", {})),
    (mutants.own_slice_of_input_gradients, (2, 1, True, "llama", {})),
    (mutants.own_output_gradient_everywhere, (2, 1, True, "llama", {})),
    (mutants.output_gradients_in_wrong_order, (2, 1, True, "llama", {})),
    (mutants.no_sum_of_partial_gradients, (2, 1, True, "llama", {})),
    (mutants.no_sum_of_partial_gradients, (4, 1, False, "llama", WIDE)),  # shared key-value heads
    (mutants.no_sum_of_partial_gradients, (2, 1, False, "qwen3", {})),  # norms over heads
    (mutants.replicas_counted_on_every_rank, (2, 1, False, "gpt2", {})),
    (mutants.same_shard_drawn_everywhere, (2, 1, False, "llama", {})),
    (mutants.padding_in_the_loss, (2, 1, True, "llama", UNEVEN)),
    (mutants.columns_off_by_one_on_one_rank, (2, 1, True, "llama", UNEVEN)),
    (mutants.rows_off_by_one_on_one_rank, (2, 1, True, "llama", UNEVEN)),
    (mutants.smoothing_over_the_local_part, (2, 1, False, "llama", SMOOTHED)),
    (mutants.mask_ignored_on_one_rank, (2, 1, True, "llama", RAGGED)),
    (mutants.mask_ignored_on_one_rank, (2, 1, False, "llama", RAGGED)),
    (mutants.heads_counted_from_each_ranks_first, (2, 1, True, "llama", DROPPED)),
    (mutants.other_attention_mask_when_rebuilt, (2, 1, True, "llama", merged(DROPPED, SELECTIVE))),
    (mutants.other_mask_when_recomputed, (2, 1, True, "gpt2", merged(merged(DROPPED, FULL), WIDE))),
]


@pytest.mark.parametrize(("mutant", "row"), BROKEN, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_broken_layout_is_caught(workplace: tuple[Path, Path], mutant: Mutant, row: Row) -> None:
    traces, expected = train_rows(workplace, row, mutant)
    with pytest.raises(AssertionError):
        assert_same_training(traces, expected)


def test_shards_of_one_weight_differ_and_make_up_the_single_process_s(workplace: tuple[Path, Path]) -> None:
    """Elsewhere a silent mistake: every rank draws the same shard."""
    row: Row = (4, 1, True, "llama", {})
    starts, _ = train_rows(workplace, row, _start)
    expected = assembled(_start(ParallelContext(dtype=torch.float64), reference(workplace, "llama", {})[0]))
    name = "blocks.1.mlp.gate_up.weight"
    parts = [piece.tensor for pieces in starts for piece in pieces if piece.name == name]
    assert len(parts) == 4
    assert not any(torch.equal(one, other) for at, one in enumerate(parts) for other in parts[:at])
    found = assembled([piece for pieces in starts for piece in pieces])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], expected[each]) for each in expected)


def _start(context: ParallelContext, config: Config) -> list[Piece]:
    """What the rank holds before the first step."""
    return train(context, config, steps=0).parameters
