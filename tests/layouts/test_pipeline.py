"""However the layers are laid over a pipeline and whatever its schedule, training is what one process computes, in
fp64; a broken pipeline is caught."""

import pytest
import torch

from tests.layouts import matrix, mutants
from tests.layouts.matrix import DROPPED, FEW, FOUR, FULL, RAGGED, SELECTIVE, Row, Workplace, row


def microbatches(count: int) -> dict[str, dict[str, int]]:
    """Of a step of all replicas."""
    return {"train": {"micro_batch_size": 12 // count}}


EIGHT = {"model": {"num_layers": 8}}
THREE = {"model": {"num_layers": 3}}
GROWING = {"train": {"micro_batch_size": 1, "batch_ramp": [4, 4, 16], "skip_steps": [2]}}
ROWS = [
    row("llama", RAGGED, pp=2, schedule="gpipe"),
    row("llama", microbatches(1), pp=2),  # fewer than ranks
    row("gpt2", FOUR, microbatches(3), pp=4, schedule="zb-h1"),
    row("llama", FOUR, pp=2, vpp=2),  # as many microbatches as ranks
    row("llama", FOUR, microbatches(6), pp=2, vpp=2, microbatch_group_size=4),  # 4, 2
    row("llama", EIGHT, microbatches(6), pp=4, vpp=2),
    row("gpt2", FOUR, microbatches(3), SELECTIVE, tp=2, pp=2, schedule="zb-h1"),
    row("gpt2", THREE, microbatches(3), pp=2, first_stage_layers=1),
    row("gpt2", FOUR, microbatches(3), pp=3, standalone_embedding=True),
    row("gpt2", FOUR, DROPPED, microbatches(3), pp=2, vpp=2, schedule="interleaved"),
    row("llama", microbatches(3), pp=3, pipeline_layout="Et||tL"),  # a rank that holds nothing
    row("llama", FOUR, microbatches(3), pp=2, vpp=2, standalone_embedding=True),  # a chunk that only passes on
    row("gpt2", FOUR, microbatches(6), FEW, pp=2, vpp=2, dp=2),
    row("gpt2", microbatches(6), FULL, FEW, pp=2, dp=2, schedule="zb-h1"),
    row("qwen3", microbatches(4), tp=2, pp=2, dp=2),
    row("llama", FOUR, GROWING, RAGGED, pp=2, vpp=2, dp=2),  # 2, 4 and 6 microbatches of a replica
]
SCHEDULES = [
    *({"pp": pp, "schedule": name} for name in ("1f1b", "gpipe", "zb-h1") for pp in (2, 4)),
    {"pp": 2, "vpp": 2},
]
LONG_ROWS = [
    row("gpt2", microbatches(3), pp=2),
    row("qwen3", FOUR, microbatches(3), pp=4),
    row("llama", FOUR, microbatches(4), RAGGED, pp=4, schedule="gpipe"),
    row("gpt2", FOUR, microbatches(4), pp=2, vpp=2),
    row("llama", microbatches(3), FULL, tp=2, pp=2),
    row("gpt2", microbatches(6), FEW, pp=2, dp=2),
    *(
        row(family, FOUR, microbatches(count), recompute, masks, **schedule, **axes)
        for family in ("gpt2", "llama")
        for schedule in SCHEDULES
        for count, axes in ((12, {}), (4, {}), (2, {}), (4, {"tp": 2}), (6, {"dp": 2}), (4, {"tp": 2, "dp": 2}))
        for recompute, masks in (({}, RAGGED), (FULL, {}))
        if "vpp" not in schedule or count // axes.get("dp", 1) >= 2
    ),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


BROKEN: list[tuple[mutants.Mutant, Row]] = [
    (mutants.no_sum_over_tied_embeddings, row("gpt2", pp=2)),
    (mutants.tied_embeddings_counted_twice, row("gpt2", pp=2)),
    (mutants.weight_gradients_forgotten, row("llama", pp=2, schedule="zb-h1")),
    (mutants.sync_before_the_weight_gradients, row("llama", pp=2, dp=2, schedule="zb-h1")),
    (mutants.activations_of_another_microbatch, row("llama", RAGGED, pp=2)),
    (mutants.loss_told_by_every_stage, row("llama", pp=2)),
]


@matrix.mutants_of(BROKEN)
def test_a_broken_pipeline_is_caught(workplace: Workplace, mutant: mutants.Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "gpt2"])  # gpt2's are tied
def test_all_schedules_give_the_same_bits(workplace: Workplace, family: str) -> None:
    """Each takes the microbatches of a chunk in one order."""
    found = [
        matrix.train_row(workplace, row(family, microbatches(3), pp=2, schedule=schedule))
        for schedule in ("1f1b", "gpipe", "zb-h1")
    ]
    for traces in found[1:]:
        for one, other in zip(traces, found[0], strict=True):
            assert (one.losses, one.grad_norms) == (other.losses, other.grad_norms)
            assert all(
                torch.equal(a.tensor, b.tensor) for a, b in zip(one.state["master"], other.state["master"], strict=True)
            )
