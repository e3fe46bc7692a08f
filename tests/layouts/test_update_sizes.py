"""Sizes of updates and weights are those of one process on every layout, in fp64, each element counted once.

All other rows of the matrix compare them, too.
"""

from dataclasses import replace
from typing import Any

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.optim import update_sizes as module
from megalite.optim.update_sizes import UpdateSizes
from megalite.optim.zero import ReplicaGroups
from tests.layouts import matrix
from tests.layouts.matrix import FEW, FOUR, Row, Workplace, row
from tests.layouts.mutants import Mutant
from tests.layouts.test_muon import moe
from tests.layouts.training import Overrides

MUON: Overrides = {"optimizer": {"name": "muon"}}
OFF: Overrides = {"optimizer": {"zero": 0}}
GROUPS: Overrides = {"optimizer": {"groups": [{"match": "blocks.0.attention.*", "lr": "3x"}], "qk_clip": 0.05}}
ROWS = [
    row("gpt2", FEW, dp=2),
    row("llama", GROUPS, MUON, FEW, tp=2),
    row("gpt2", FOUR, FEW, pp=2),  # tied embeddings, which two ranks of a pipeline hold
    row("qwen3", MUON, moe(), FEW, dp=2, ep=2),
    row("llama", OFF, dp=2),
]
LONG_ROWS = [
    row("gpt2", {"optimizer": {"instances": 2}}, FEW, dp=4),
    row("qwen3", MUON, tp=4),
    row("llama", MUON, moe(), FEW, tp=2, etp=1, ep=2),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_measure_like_one_process(workplace: Workplace, row: Row) -> None:
    reference = row.reference(workplace)
    assert min(min(sizes["update_rms"].values()) for sizes in reference.sizes) > 1e-6
    matrix.assert_equal(workplace, row)


def every_rank_counts_what_all_have(context: ParallelContext, config: Config) -> None:
    right = module.slice_ranges
    module.slice_ranges = lambda owned, wanted: right(
        owned, lambda record, box: wanted(record, replace(box, counted=True))
    )


def every_replica_counts(context: ParallelContext, config: Config) -> None:
    right = UpdateSizes.__init__

    def init(self: UpdateSizes, buffers: Any, replicas: Any, config: Any, **others: Any) -> None:
        right(self, buffers, {kind: ReplicaGroups() for kind in replicas}, config, **others)

    UpdateSizes.__init__ = init  # type: ignore[method-assign]


def both_ends_count_a_tied_embedding(context: ParallelContext, config: Config) -> None:
    module.is_counted = lambda record, box, *, embedding: box.counted


def this_rank_alone(context: ParallelContext, config: Config) -> None:
    right = UpdateSizes.__init__

    def init(self: UpdateSizes, *args: Any, **others: Any) -> None:
        right(self, *args, **{**others, "world": None})

    UpdateSizes.__init__ = init  # type: ignore[method-assign]


BROKEN: list[tuple[Mutant, Row]] = [
    (every_rank_counts_what_all_have, row("llama", FEW, tp=2)),
    (every_replica_counts, row("llama", OFF, dp=2)),
    (both_ends_count_a_tied_embedding, row("gpt2", FOUR, FEW, pp=2)),
    (this_rank_alone, row("gpt2", FEW, dp=2)),
]


@matrix.mutants_of(BROKEN)
def test_a_broken_measure_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
