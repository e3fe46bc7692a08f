"""Tensor and sequence parallelism compute what one process computes, in fp64, and a broken one is caught."""

from typing import Any

from tests.layouts import matrix, mutants
from tests.layouts.matrix import DROPPED, FULL, RAGGED, SELECTIVE, Row, Workplace, row
from tests.layouts.training import merged

SMOOTHED = {"train": {"label_smoothing": 0.1, "z_loss": 1e-3}}
UNEVEN = {"model": {"vocab_multiple": 7}}  # 257 tokens in 259 rows
COMPILE = {"train": {"compile": True}}
ALONE: dict[str, Any] = {"sequence_parallel": False}
ROWS = [
    row("gpt2", DROPPED, RAGGED, tp=2, **ALONE),
    row("llama", UNEVEN, tp=4),  # two key-value heads for four ranks
    row("llama", SMOOTHED, DROPPED, tp=4, **ALONE),
    row("llama", RAGGED, tp=2, dp=2),
    row("qwen3", SELECTIVE, tp=4),
    row("qwen3", FULL, tp=2, **ALONE),
    row("gpt2", DROPPED, FULL, tp=2),
    row("llama", DROPPED, SELECTIVE, tp=2),
]
LONG_ROWS = [
    row("llama", COMPILE, DROPPED, tp=2),
    row("gpt2", COMPILE, SELECTIVE, tp=2, **ALONE),
    row("gpt2", tp=2),
    row("gpt2", SELECTIVE, tp=2, dp=2, **ALONE),
    *(
        row(family, changes, recompute, tp=tp, dp=dp, sequence_parallel=sequence_parallel)
        for tp in (2, 4)
        for dp in (1, 2)
        for sequence_parallel in (False, True)
        for family in ("gpt2", "llama", "qwen3")
        for changes in (RAGGED, merged(SMOOTHED, UNEVEN), DROPPED)
        for recompute in ({}, SELECTIVE, FULL)
    ),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


BROKEN: list[tuple[mutants.Mutant, Row]] = [
    (mutants.no_sum_of_input_gradients, row("llama", tp=2, **ALONE)),
    (mutants.own_slice_of_input_gradients, row("llama", tp=2)),
    (mutants.no_sum_of_partial_gradients, row("llama", tp=2)),
    (mutants.no_sum_of_partial_gradients, row("llama", tp=4, **ALONE)),  # shared key-value heads
    (mutants.replicas_counted_on_every_rank, row("gpt2", tp=2, **ALONE)),
    (mutants.padding_in_the_loss, row("llama", UNEVEN, tp=2)),
    (mutants.rows_off_by_one_on_one_rank, row("llama", UNEVEN, tp=2)),
    (mutants.mask_ignored_on_one_rank, row("llama", RAGGED, tp=2)),
    (mutants.heads_counted_from_each_ranks_first, row("llama", DROPPED, tp=2)),
    (mutants.other_mask_when_recomputed, row("gpt2", DROPPED, FULL, tp=2)),
]
LONG_BROKEN: list[tuple[mutants.Mutant, Row]] = [
    (mutants.own_output_gradient_everywhere, row("llama", tp=2)),
    (mutants.output_gradients_in_wrong_order, row("llama", tp=2)),
    (mutants.no_sum_of_partial_gradients, row("qwen3", tp=2, **ALONE)),  # norms over heads
    (mutants.same_shard_drawn_everywhere, row("llama", tp=2, **ALONE)),
    (mutants.columns_off_by_one_on_one_rank, row("llama", UNEVEN, tp=2)),
    (mutants.smoothing_over_the_local_part, row("llama", SMOOTHED, tp=2, **ALONE)),
    (mutants.other_attention_mask_when_rebuilt, row("llama", DROPPED, SELECTIVE, tp=2)),
]


@matrix.mutants_of(BROKEN, LONG_BROKEN)
def test_a_broken_layout_is_caught(workplace: Workplace, mutant: mutants.Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
