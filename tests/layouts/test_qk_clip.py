"""However a layout cuts heads, sequences and state, QK-clip multiplies what it multiplies in one process, in fp64."""

import torch

from tests.layouts import matrix, qk_clip_mutants
from tests.layouts.matrix import FEW, FOUR, FULL, RAGGED, SELECTIVE, Row, Workplace, row
from tests.layouts.mutants import Mutant
from tests.layouts.training import Overrides

LARGEST = 4.0
CLIP: Overrides = {"optimizer": {"qk_clip": LARGEST}}
MUON: Overrides = {"optimizer": {"qk_clip": LARGEST, "name": "muon"}}
ONE_KEY: Overrides = {"model": {"num_key_value_heads": 1}}
OFF: Overrides = {"optimizer": {"zero": 0}}
COMPILED: Overrides = {"train": {"compile": True}}
MOE: Overrides = {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}}
ROWS = [
    row("gpt2", CLIP, FEW, dp=2),
    row("llama", CLIP, RAGGED, {"train": {"micro_batch_size": 1}}, dp=2),
    row("llama", MUON, tp=2),  # and sequence parallelism
    row("llama", CLIP, ONE_KEY, tp=4),
    row("gpt2", CLIP, SELECTIVE, pp=2),
    row("llama", CLIP, RAGGED, cp=2, cp_comm="ring"),
    row("llama", CLIP, COMPILED),
]
LONG_ROWS = [
    row("gpt2", MUON, FOUR, FULL, pp=2, dp=2, vpp=2),
    row("llama", CLIP, ONE_KEY, OFF, tp=4, dp=2, sequence_parallel=False),
    row("gpt2", MUON, OFF, dp=4),
    row("llama", CLIP, cp=2, cp_comm="allgather"),
    row("llama", CLIP, cp=2, dp=2, cp_comm="alltoall"),
    row("gpt2", MUON, RAGGED, cp=4, cp_comm="alltoall+ring", cp_alltoall=2),
    row("llama", CLIP, COMPILED, RAGGED, SELECTIVE, cp=2, cp_comm="ring"),
    row("gpt2", CLIP, COMPILED, SELECTIVE, tp=2),
    row("llama", MUON, MOE, dp=4, ep=2),
    row("llama", CLIP, ONE_KEY, FOUR, MOE, tp=2, pp=2, cp=2, ep=2),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_clip_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)
    logits = torch.tensor(row.reference(workplace).logits)
    assert bool((logits > LARGEST).any(0).all()), f"each layer is clipped: {logits}"


BROKEN: list[tuple[Mutant, Row]] = [
    (qk_clip_mutants.of_the_last_microbatch, row("gpt2", CLIP, dp=2)),
    (qk_clip_mutants.of_this_rank, row("llama", CLIP, dp=2)),
    (qk_clip_mutants.of_this_rank, row("llama", CLIP, ONE_KEY, tp=2)),
    (qk_clip_mutants.of_own_keys, row("llama", CLIP, cp=2)),
    (qk_clip_mutants.of_the_box, row("llama", CLIP, ONE_KEY, tp=2)),
    (qk_clip_mutants.without_documents, row("llama", CLIP, RAGGED, dp=2)),
]


@matrix.mutants_of(BROKEN)
def test_a_broken_clip_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
