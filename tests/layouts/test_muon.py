"""However a layout cuts matrices, Muon orthogonalises them whole: training is what one process computes, in fp64."""

from tests.layouts import matrix
from tests.layouts.matrix import FEW, FOUR, RAGGED, Row, Workplace, row

MUON = {"optimizer": {"name": "muon"}}
OFF = {"optimizer": {"zero": 0}}
TWO_INSTANCES = {"optimizer": {"instances": 2}}
HEADS = {"optimizer": {"muon": {"qkv": "head", "coefficients": "quintic", "nesterov": False, "scale": "max_ratio"}}}
ONE_EACH = {"train": {"micro_batch_size": 1}}
MOE = {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coeff": 0.1}}}
ROWS = [
    row("gpt2", MUON, FEW, dp=2),
    row("llama", MUON, FEW, ONE_EACH, dp=4),
    row("llama", MUON, tp=2),
    row("qwen3", MUON, FEW, tp=4),
    row("qwen3", MUON, HEADS, tp=2, dp=2),
    row("gpt2", MUON, pp=2),
    row("llama", MUON, MOE, ep=2, etp=1, dp=2),
    row("llama", MUON, MOE, tp=2, etp=2, ep=2, dp=2),
]


@matrix.rows_of(ROWS, [])
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)
