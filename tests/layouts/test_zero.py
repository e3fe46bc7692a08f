"""However the optimizer's state is cut, training is what one process computes, in fp64; a broken cut is caught."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.layout.ranks import ParallelLayout
from megalite.train.build import needs_of
from tests.layouts import mutants
from tests.layouts.reference import reference
from tests.layouts.test_tensor_parallel import Mutant, Overrides, layout_config, merged
from tests.layouts.training import Trace, assert_same_training, train
from tests.ranks import run_ranks

OFF = {"optimizer": {"zero": 0}}
ONE_EACH = {"optimizer": {"bucket_size": 1}}
FEW = {"optimizer": {"bucket_size": 6000}}  # a block and a half: it ends at the block
TWO_INSTANCES = {"optimizer": {"instances": 2}}
LATE = {"optimizer": {"overlap": False}}
WHOLE = {"optimizer": {"ownership": "whole"}}
AT_ONCE = {"train": {"micro_batch_size": 3}}  # dp 4: one microbatch a rank, no accumulation
THRICE = {"train": {"micro_batch_size": 1}}  # dp 4: three
RAGGED = {"data": {"mask_end_of_document": True, "cross_document_attention": False}}
Row = tuple[int, int, str, Overrides]  # tp (with sequence parallelism), dp, family, overrides
ROWS: list[Row] = [
    (1, 2, "gpt2", merged(FEW, RAGGED)),
    (1, 2, "llama", merged(OFF, FEW)),
    (1, 3, "qwen3", merged(ONE_EACH, {"train": {"micro_batch_size": 2}})),
    (1, 4, "llama", merged(TWO_INSTANCES, FEW, AT_ONCE)),
    (1, 4, "gpt2", merged(ONE_EACH, TWO_INSTANCES, THRICE, RAGGED)),
    (1, 4, "gpt2", merged(WHOLE, FEW, AT_ONCE)),
    (2, 2, "gpt2", FEW),
    (2, 2, "llama", merged(OFF, ONE_EACH, AT_ONCE)),
    (2, 2, "qwen3", merged(WHOLE, LATE, AT_ONCE)),
]
LONG_ROWS: list[Row] = [
    (tp, dp, family, merged(sharing, buckets, accumulation))
    for tp, dp in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 4), (4, 2))
    for family in ("gpt2", "llama")
    for sharing in (OFF, {}, WHOLE, *([TWO_INSTANCES] if dp % 2 == 0 else []))
    for buckets in (ONE_EACH, FEW, {})
    for accumulation in (THRICE, {"train": {"micro_batch_size": 12 // dp}})
]


def train_row(workplace: tuple[Path, Path], row: Row, function: Any = train) -> tuple[list[Trace], Trace]:
    """Traces of all ranks, and of the single process, whose buffers are cut in no way."""
    tp, dp, family, overrides = row
    config = layout_config(workplace, (tp, dp, tp > 1, family, overrides))
    plain = {section: values for section, values in overrides.items() if section != "optimizer"}
    _, expected = reference(workplace, family, plain)
    assert min(expected.grad_norms) > 10 * config.optimizer.clip_grad, "clipping is part of what is compared"
    layout = ParallelLayout(tp=tp, dp=dp)
    return run_ranks(
        function, tp * dp, config, dtype=torch.float64, layout=layout, needs=needs_of(config), timeout=240
    ), expected


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_ranks_train_like_one_process(workplace: tuple[Path, Path], row: Row) -> None:
    assert_same_training(*train_row(workplace, row))


@pytest.mark.long
@pytest.mark.parametrize("row", LONG_ROWS, ids=str)
def test_ranks_train_like_one_process_everywhere(workplace: tuple[Path, Path], row: Row) -> None:
    assert_same_training(*train_row(workplace, row))


@pytest.mark.parametrize(
    ("dp", "changes"), [(2, {}), (2, OFF), (4, TWO_INSTANCES)], ids=["zero", "off", "two instances"]
)
def test_overlap_changes_no_bit(workplace: tuple[Path, Path], dp: int, changes: Overrides) -> None:
    row: Row = (1, dp, "gpt2", merged(changes, FEW, AT_ONCE))
    overlapped, _ = train_row(workplace, row)
    late, _ = train_row(workplace, (*row[:3], merged(row[3], LATE)))
    for one, other in zip(overlapped, late, strict=True):
        assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)
        kinds = [(one.parameters, other.parameters), (one.first_moments, other.first_moments)]
        for mine, theirs in [*kinds, *zip(one.gradients, other.gradients, strict=True)]:
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(mine, theirs, strict=True))


def test_parameters_that_arrive_only_when_waited_for_are_waited_for(workplace: tuple[Path, Path]) -> None:
    """The slowest network: nothing arrives before somebody waits."""
    assert_same_training(*train_row(workplace, (1, 2, "gpt2", FEW), mutants.gather_at_the_last_moment))


BROKEN: list[tuple[Mutant, Row]] = [
    (mutants.no_gather_of_parameters, (1, 2, "llama", FEW)),
    (mutants.use_before_arrival, (1, 2, "llama", FEW)),
    (mutants.use_before_arrival, (1, 2, "gpt2", FEW)),
    (mutants.no_sum_across_instances, (1, 4, "llama", merged(TWO_INSTANCES, AT_ONCE))),
    (mutants.no_sum_inside_instances, (1, 4, "llama", merged(TWO_INSTANCES, AT_ONCE))),
    (mutants.instances_counted_twice, (1, 4, "llama", merged(TWO_INSTANCES, AT_ONCE))),
    (mutants.next_rank_s_slices, (1, 2, "gpt2", FEW)),
    (mutants.sent_before_the_last_gradient, (1, 2, "gpt2", FEW)),
    (mutants.sent_before_the_last_microbatch, (1, 2, "gpt2", FEW)),
    (mutants.no_sum_of_partial_gradients, (2, 2, "llama", AT_ONCE)),
    (mutants.decay_of_everything, (1, 2, "gpt2", FEW)),
]


@pytest.mark.parametrize(("mutant", "row"), BROKEN, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_broken_cut_is_caught(workplace: tuple[Path, Path], mutant: Mutant, row: Row) -> None:
    traces, expected = train_row(workplace, row, mutant)
    with pytest.raises(AssertionError):
        assert_same_training(traces, expected)
