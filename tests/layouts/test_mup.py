"""Start values, rates, eps and decay that follow the model's width and depth are the same in every layout, in fp64."""

from typing import Any

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.model import scaling
from tests.layouts import matrix
from tests.layouts.matrix import FEW, FOUR, Row, Workplace, row
from tests.layouts.mutants import Mutant
from tests.layouts.training import Overrides


def mup(width: int, layers: int, **settings: Any) -> Overrides:
    return {"model": {"mup_base_width": width, "mup_base_layers": layers, **settings}}


MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coeff": 0.1}
MUON: Overrides = {"optimizer": {"name": "muon"}}
ROWS = [
    row("gpt2", mup(8, 1), FEW, dp=2),
    row("llama", mup(16, 1), tp=2),
    row("gpt2", FOUR, mup(64, 1), pp=2),  # both ends hold the embedding; the last the norm that scales logits
    row("llama", mup(16, 1, moe=MOE), dp=2, ep=2),
    row("llama", mup(16, 1), MUON, FEW, tp=2),
]
LONG_ROWS = [
    row("llama", FOUR, mup(16, 8, moe=MOE, qk_norm=True), FEW, tp=2, pp=2, dp=2, ep=2, etp=2),
    row("gpt2", FOUR, mup(8, 1), pp=2, vpp=2, dp=2, schedule="interleaved"),
    row("llama", mup(16, 1, moe=MOE), MUON, FEW, tp=2, etp=1, ep=2),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


def depth_of_the_own_stage(context: ParallelContext, config: Config) -> None:
    whole = scaling.growth
    scaling.growth = lambda model: (whole(model)[0], whole(model)[1] / context.size("pp"))


def width_of_the_own_shard(context: ParallelContext, config: Config) -> None:
    whole = scaling.growth
    scaling.growth = lambda model: (whole(model)[0] / context.size("tp"), whole(model)[1])


BROKEN: list[tuple[Mutant, Row]] = [
    (depth_of_the_own_stage, row("gpt2", FOUR, mup(64, 1), pp=2)),
    (width_of_the_own_shard, row("llama", mup(16, 1), tp=2)),
    (width_of_the_own_shard, row("llama", mup(16, 1), MUON, FEW, tp=2)),
]


@matrix.mutants_of(BROKEN)
def test_a_factor_of_a_part_of_the_model_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
