"""However data parallelism cuts batches and the optimizer's state, training is what one process computes, in fp64; a
broken cut is caught."""

from functools import partial

import pytest
import torch

from tests.layouts import matrix, mutants
from tests.layouts.matrix import DROPPED, FEW, FULL, RAGGED, Row, Workplace, row
from tests.layouts.training import Overrides, assert_same_training, merged

OFF = {"optimizer": {"zero": 0}}
ONE_EACH = {"optimizer": {"bucket_size": 1}}
TWO_INSTANCES = {"optimizer": {"instances": 2}}
LATE = {"optimizer": {"overlap": False}}
WHOLE = {"optimizer": {"ownership": "whole"}}
AT_ONCE = {"train": {"micro_batch_size": 3}}  # dp 4: one microbatch a rank, no accumulation
ROWS = [
    row("gpt2", FEW, RAGGED, dp=2),
    row("llama", OFF, FEW, DROPPED, dp=2),
    row("qwen3", ONE_EACH, FULL, dp=3),
    row("gpt2", ONE_EACH, TWO_INSTANCES, RAGGED, dp=4),
    row("gpt2", WHOLE, FEW, AT_ONCE, dp=4),
    row("qwen3", WHOLE, LATE, AT_ONCE, tp=2, dp=2),
]
LONG_ROWS = [
    row("llama", TWO_INSTANCES, FEW, AT_ONCE, dp=4),
    row("gpt2", FEW, tp=2, dp=2),
    row("llama", OFF, ONE_EACH, AT_ONCE, tp=2, dp=2),
    *(
        row(family, sharing, buckets, accumulation, others, dp=dp, tp=tp)
        for tp, dp in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 4), (4, 2))
        for family, others in (("gpt2", {}), ("llama", {}), ("qwen3", merged(RAGGED, FULL)))
        for sharing in (OFF, {}, WHOLE, *([TWO_INSTANCES] if dp % 2 == 0 else []))
        for buckets in (ONE_EACH, FEW, {})
        for accumulation in ({"train": {"micro_batch_size": 1}}, {"train": {"micro_batch_size": 12 // dp}})
    ),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


@pytest.mark.parametrize(
    ("dp", "changes"),
    [(2, {}), pytest.param(2, OFF, marks=pytest.mark.long), (4, TWO_INSTANCES)],
    ids=["zero", "off", "two instances"],
)
def test_overlap_changes_no_bit(workplace: Workplace, dp: int, changes: Overrides) -> None:
    overlapped = matrix.train_row(workplace, row("gpt2", changes, FEW, dp=dp))
    late = matrix.train_row(workplace, row("gpt2", changes, FEW, LATE, dp=dp))
    for one, other in zip(overlapped, late, strict=True):
        assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)
        kinds = [(one.parameters, other.parameters), (one.state["exp_avg"], other.state["exp_avg"])]
        for mine, theirs in [*kinds, *zip(one.gradients, other.gradients, strict=True)]:
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(mine, theirs, strict=True))


def test_parameters_that_arrive_only_when_waited_for_are_waited_for(workplace: Workplace) -> None:
    """The slowest network: nothing arrives before somebody waits."""
    slow = row("gpt2", FEW, dp=2)
    slow_network = partial(matrix.train_broken, mutants.gather_at_the_last_moment)
    assert_same_training(matrix.train_row(workplace, slow, slow_network), slow.reference(workplace))


BROKEN: list[tuple[mutants.Mutant, Row]] = [
    (mutants.mean_of_local_means, row("llama", RAGGED, dp=2)),
    (mutants.no_sum_across_instances, row("llama", OFF, dp=2)),
    (mutants.no_gather_of_parameters, row("llama", FEW, dp=2)),
    (mutants.use_before_arrival, row("gpt2", FEW, dp=2)),
    (mutants.no_sum_across_instances, row("llama", TWO_INSTANCES, AT_ONCE, dp=4)),
    (mutants.no_sum_inside_instances, row("llama", TWO_INSTANCES, AT_ONCE, dp=4)),
    (mutants.instances_counted_twice, row("llama", TWO_INSTANCES, AT_ONCE, dp=4)),
    (mutants.next_rank_s_slices, row("gpt2", FEW, dp=2)),
    (mutants.sent_before_the_last_gradient, row("gpt2", FEW, dp=2)),
    (mutants.sent_before_the_last_microbatch, row("gpt2", FEW, dp=2)),
    (mutants.decay_of_everything, row("gpt2", FEW, dp=2)),
]
LONG_BROKEN: list[tuple[mutants.Mutant, Row]] = [
    (mutants.use_before_arrival, row("llama", FEW, dp=2)),
    (mutants.no_sum_of_partial_gradients, row("llama", AT_ONCE, tp=2, dp=2)),
]


@matrix.mutants_of(BROKEN, LONG_BROKEN)
def test_a_broken_cut_is_caught(workplace: Workplace, mutant: mutants.Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
