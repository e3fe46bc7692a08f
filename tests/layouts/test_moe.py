"""However experts are laid over ranks, training is what one process computes, in fp64; broken exchanges are caught."""

from typing import Any

from tests.layouts import matrix, moe_mutants
from tests.layouts.matrix import DROPPED, FEW, FOUR, FULL, RAGGED, Row, Workplace, row
from tests.layouts.mutants import Mutant
from tests.layouts.training import Overrides

LOSSES = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.01}


def moe(**settings: Any) -> Overrides:
    """Four small experts of which a token takes two, with both losses."""
    sizes = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}
    return {"model": {"moe": {**sizes, **LOSSES, **settings}}}


SIGMOID = {"score": "sigmoid", "expert_bias_rate": 0.01, "num_groups": 2, "top_k_groups": 1, "scaling_factor": 2.5}
SHARED = {"num_shared_experts": 1, "first_dense_layers": 1}
RECOMPUTED = {"train": {"recompute": "selective", "recompute_modules": ["norm", "activation", "moe"]}}
ROWS = [
    row("llama", moe(**SHARED), tp=2, etp=1, ep=2),
    row("llama", moe(dispatcher="allgather"), tp=2, dp=2, etp=2, ep=2),
    row("llama", moe(**SIGMOID), tp=2, dp=2, etp=1, ep=2),
    row("llama", moe(aux_loss="sequence"), RAGGED, FULL, tp=2, dp=2, etp=1, ep=4),
    row("llama", moe(aux_loss="global"), RAGGED, dp=2, ep=2),
    row("llama", moe(capacity_factor=0.75), RAGGED, tp=2, dp=2, etp=1, ep=2),
    row("gpt2", FOUR, moe(), RECOMPUTED, DROPPED, pp=2, dp=2, ep=2, schedule="zb-h1"),
    row("llama", moe(), FEW, {"optimizer": {"instances": 2}}, dp=4, ep=2),
    row("llama", moe(), FEW, {"optimizer": {"zero": 0}}, dp=4, ep=2),
    row("llama", FOUR, moe(), pp=2, vpp=2, dp=2, ep=2),
    row("llama", moe(), RAGGED, tp=2, etp=1),  # ep 1: both ranks hold all experts
]
LONG_ROWS = [
    row("llama", moe(), RAGGED, dp=4, ep=4),
    row("gpt2", moe(), tp=2),  # ep 1, etp 2
    row("llama", moe(), dp=2, ep=2),
    row("llama", moe(), dp=4, ep=2),
    row("llama", moe(), RAGGED, dp=2, etp=2),
    row("llama", moe(), tp=2, dp=2, etp=1, ep=4),
    row("llama", moe(), tp=2, dp=2, etp=2, ep=2),
    row("llama", moe(**SHARED), tp=2, dp=2, etp=4),
    row("llama", moe(dispatcher="allgather"), RAGGED, dp=2, ep=2),
    row("llama", FOUR, moe(**SHARED), RECOMPUTED, pp=2, dp=2, ep=2),
    row("llama", FOUR, moe(**SIGMOID, layer_freq=2), RAGGED, pp=4, schedule="gpipe"),  # ranks without experts
    row("llama", FOUR, moe(), tp=2, pp=2, dp=2, ep=2, etp=2),
    row("llama", FOUR, moe(**SIGMOID), RAGGED, tp=2, pp=2, dp=2, ep=4, etp=1, schedule="zb-h1"),
    row("llama", moe(), {"train": {"micro_batch_size": 3}}, dp=4, ep=2),
    row("llama", moe(num_experts=6, aux_loss="global"), {"train": {"micro_batch_size": 1}}, tp=2, dp=3, etp=1, ep=6),
    row("llama", moe(), tp=2, dp=2, etp=1, ep=2, order="ep-tp-dp-pp"),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


BROKEN: list[tuple[Mutant, Row]] = [
    (moe_mutants.experts_summed_over_dp, row("llama", moe(), dp=4, ep=2)),
    (moe_mutants.own_counts_move_the_bias, row("llama", moe(**SIGMOID), dp=2, ep=2)),
    (moe_mutants.rows_returned_in_the_experts_order, row("llama", moe(), dp=2, ep=2)),
    (moe_mutants.no_sum_of_router_gradients, row("llama", moe(), tp=2, etp=1, ep=2)),
]
LONG_BROKEN: list[tuple[Mutant, Row]] = [
    (moe_mutants.experts_counted_on_every_replica, row("llama", moe(), {"optimizer": {"zero": 0}}, dp=4, ep=2)),
    (moe_mutants.expert_gradients_divided_by_ep, row("llama", moe(), dp=2, ep=2)),
    (moe_mutants.same_experts_drawn_everywhere, row("llama", moe(), dp=2, ep=2)),
    (moe_mutants.no_sum_of_sequence_counts, row("llama", moe(), tp=2, etp=1, ep=2)),
    (moe_mutants.counts_of_another_layer, row("llama", moe(**SIGMOID), pp=2)),
    (moe_mutants.router_losses_not_attached, row("llama", moe(), pp=2)),
    (moe_mutants.router_losses_of_every_microbatch_whole, row("llama", moe(), dp=2, ep=2)),
    (moe_mutants.router_losses_divided_by_dp, row("llama", moe(), dp=2, ep=2)),
    (moe_mutants.no_gradient_of_the_weights, row("llama", moe(), dp=2, ep=2)),
    (moe_mutants.weights_of_other_rows, row("llama", moe(), dp=2, ep=2)),
    (moe_mutants.no_sum_of_gathered_gradients, row("llama", moe(dispatcher="allgather"), dp=2, ep=2)),
    (moe_mutants.capacity_of_the_own_part, row("llama", moe(capacity_factor=0.75), tp=2, etp=1, ep=2)),
]


@matrix.mutants_of(BROKEN, LONG_BROKEN)
def test_a_broken_mixture_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
