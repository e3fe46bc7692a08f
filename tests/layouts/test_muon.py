"""However a layout cuts matrices, Muon orthogonalises them whole: training is what one process computes, in fp64.

Every matrix sees more tokens in a step than its smaller side has rows: of a gradient of lower rank Newton-Schulz also
grows what is rounding noise.
"""

from typing import Any

import torch

from tests.layouts import matrix, muon_mutants
from tests.layouts.matrix import FEW, FOUR, FULL, RAGGED, Row, Workplace, row
from tests.layouts.mutants import Mutant
from tests.layouts.training import Overrides


def muon(**settings: Any) -> Overrides:
    return {"optimizer": {"name": "muon", "muon": settings}}


def moe(**settings: Any) -> Overrides:
    return {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coeff": 0.1, **settings}}}


def microbatches(size: int) -> Overrides:
    return {"train": {"micro_batch_size": size}}


OFF = {"optimizer": {"zero": 0}}
TWO_INSTANCES = {"optimizer": {"instances": 2}}
OTHER = muon(qkv="head", coefficients="quintic", nesterov=False, scale="max_ratio", lr=3e-3, weight_decay=0.3)
IDLE = moe(num_experts=16, top_k=1, aux_loss_coeff=0.0)  # some have no token in some steps
ROWS = [
    row("gpt2", muon(), FEW, dp=2),
    row("llama", muon(), FEW, microbatches(1), RAGGED, dp=4),
    row("llama", OTHER, FEW, tp=2),
    row("qwen3", muon(), FEW, tp=4),  # one key-value head
    row("qwen3", muon(), FULL, tp=2, dp=2),
    row("gpt2", muon(), FEW, FOUR, pp=2, dp=2, schedule="zb-h1"),
    row("llama", muon(), IDLE, tp=2, etp=1, ep=2),
    row("llama", muon(router=False), moe(num_shared_experts=1), FEW, tp=2, etp=2, ep=2, dp=2),
]
LONG_ROWS = [
    row("llama", muon(), OFF, dp=2),
    row("gpt2", muon(), TWO_INSTANCES, dp=4),
    row("qwen3", OTHER, FEW, tp=4, dp=2),
    row("llama", muon(coefficients="polar_express", steps=9), FEW, tp=4),
    row("gpt2", muon(), OFF, tp=2, sequence_parallel=False),
    row("llama", muon(), FOUR, pp=2),
    row("llama", muon(), FOUR, pp=2, vpp=2, dp=2),
    row("llama", muon(), RAGGED, cp=2, dp=2),
    row("llama", muon(), moe(), dp=4, ep=2),
    row("llama", muon(), moe(), RAGGED, dp=4, ep=4),
    row("llama", muon(), IDLE, FEW, dp=2, etp=2),
    row("llama", OTHER, moe(), {"optimizer": {"instances": 2}}, tp=2, dp=4, etp=2, ep=2),
    row("qwen3", muon(), FOUR, moe(), FEW, tp=2, pp=2, dp=2, ep=2, etp=2),
    row("llama", muon(), FOUR, moe(), tp=2, cp=2, pp=2, ep=4, etp=1),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


def test_experts_are_idle_where_rows_say_so(workplace: Workplace) -> None:
    """Some of them, in some steps and not in others; else these rows would compare nothing."""
    counts = torch.stack(row("llama", muon(), IDLE, dp=2, etp=2).reference(workplace).routing)[..., :16]
    idle = (counts == 0).sum(0)
    assert bool(((idle > 0) & (idle < len(counts))).any())


BROKEN: list[tuple[Mutant, Row]] = [
    (muon_mutants.shards_for_themselves, row("llama", muon(), tp=2)),
    (muon_mutants.replicas_of_keys_entered_twice, row("qwen3", muon(), tp=2)),
    (muon_mutants.scale_of_the_shard, row("llama", muon(scale="max_ratio"), tp=2)),
    (muon_mutants.idle_experts_judged_by_shards, row("gpt2", muon(), IDLE, dp=2, etp=2)),
    (muon_mutants.fused_queries_keys_and_values, row("llama", muon(), dp=2)),
    (muon_mutants.fused_gate_and_up, row("llama", muon(), dp=2)),
    (muon_mutants.clipped_too_late, row("llama", muon(), dp=2)),
]


@matrix.mutants_of(BROKEN)
def test_a_broken_cut_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
