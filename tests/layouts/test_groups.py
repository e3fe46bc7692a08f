"""Parameters with a learning rate and weight decay of their own have them in every layout, in fp64."""

from dataclasses import replace
from typing import Any

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.optim import optimizer as optimizer_module
from tests.layouts import matrix
from tests.layouts.matrix import FEW, FOUR, Row, Workplace, row
from tests.layouts.mutants import Mutant
from tests.layouts.training import Overrides

TIED = "embedding.word.weight"
GROUPS = [
    {"match": TIED, "lr": 3e-3},
    {"match": "blocks.0.attention.*", "lr": "0.2x", "weight_decay": 0.4},
    {"match": "*.router.*", "lr": "0.1x", "weight_decay": 0.0},
    {"match": "blocks.1.*", "lr": "2x"},
]


def grouped(*numbers: int, name: str = "adamw") -> Overrides:
    return {"optimizer": {"name": name, "groups": [GROUPS[number] for number in numbers]}}


EXPERTS: Overrides = {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coeff": 0.1}}}
TO_ZERO: Overrides = {"optimizer": {"weight_decay_schedule": "to_zero"}}
ROWS = [
    row("gpt2", grouped(0, 1, 3), FEW, dp=2),
    row("qwen3", grouped(0, 1, 3), TO_ZERO, FEW, tp=2),
    row("llama", grouped(1), {"optimizer": {"cautious": True}}, FEW, tp=2, dp=2),
    row("gpt2", grouped(0, 1), FOUR, pp=2),  # the first and the last stage update a copy of the embedding each
    row("llama", grouped(1, 3, name="muon"), TO_ZERO, FEW, tp=2),
    row("gpt2", grouped(0, 1, name="muon"), FEW, dp=2),
]
LONG_ROWS = [
    row("llama", grouped(1, 2, 3), EXPERTS, tp=2, dp=2, ep=2, etp=1),
    row("gpt2", grouped(0, 1, 2, name="muon"), EXPERTS, FOUR, tp=2, pp=2, dp=2, ep=2, etp=2),
    row("gpt2", grouped(0, 1, 3), {"optimizer": {"instances": 2}}, FEW, dp=4),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


def without_groups(config: Config) -> Config:
    return replace(config, optimizer=replace(config.optimizer, groups=[]))


def second_copy_in_no_group(context: ParallelContext, config: Config) -> None:
    """The last stage's, of a tied embedding."""
    right = optimizer_module.update_rules

    def update_rules(records: Any, config: Config) -> Any:
        usual = right(records := list(records), without_groups(config))
        rules = right(records, config)
        return (
            rules if context.coordinates["pp"] == 0 else rules | {name: usual[name] for name in usual if name == TIED}
        )

    optimizer_module.update_rules = update_rules


def rates_of_the_first_rank_alone(context: ParallelContext, config: Config) -> None:
    right = optimizer_module.update_rules

    def update_rules(records: Any, config: Config) -> Any:
        return right(records, config if context.rank == 0 else without_groups(config))

    optimizer_module.update_rules = update_rules


BROKEN: list[tuple[Mutant, Row]] = [
    (second_copy_in_no_group, row("gpt2", grouped(0, 1), FOUR, pp=2)),
    (rates_of_the_first_rank_alone, row("gpt2", grouped(0, 1, 3), FEW, dp=2)),
    (rates_of_the_first_rank_alone, row("llama", grouped(1, 3, name="muon"), FEW, tp=2)),
]


@matrix.mutants_of(BROKEN)
def test_a_broken_group_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
