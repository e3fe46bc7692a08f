"""However ranks share a sequence, training is what one process computes, in fp64; broken exchanges are caught."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.config.step_plan import planned_steps
from megalite.context_parallel.attention import _Tiles
from megalite.data.batch import Batch
from megalite.data.batches import train_batches
from megalite.data.open import open_data
from megalite.data.samples import SampleSource
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from megalite.layout.sequence import CpShard, Tile
from megalite.model.gpt import GPT
from megalite.prepare.prepare import prepare
from megalite.train.build import build_training, data_share, derive_device, fill_with_start_values, needs_of
from megalite.train.evaluate import sample
from megalite.train.step import TrainStep
from tests.layouts import matrix, mutants
from tests.layouts.matrix import DROPPED, FOUR, FULL, RAGGED, SELECTIVE, Row, Workplace, row
from tests.layouts.test_moe import SIGMOID, moe
from tests.layouts.training import Overrides, merged, train
from tests.ranks import run_ranks

LONG: Overrides = {"train": {"seq_length": 64}}  # 2 pieces of 16 tokens for each of two ranks of a ring
LONGER: Overrides = {"train": {"seq_length": 96}}
EXTRAS = {"train": {"seq_length": 64, "label_smoothing": 0.1, "z_loss": 0.01}}
RESIDUAL = {"model": {"dropout": 0.1, "attention_dropout": 0.0, "embedding_dropout": 0.2}}


ROWS = [
    row("gpt2", EXTRAS, cp=2, cp_comm="ring"),
    row("qwen3", merged(LONG, RAGGED), cp=2, cp_comm="allgather"),
    row("llama", merged(LONG, RAGGED, DROPPED), cp=2, tp=2, cp_comm="alltoall"),
    row("llama", merged(LONG, RESIDUAL), SELECTIVE, cp=2, dp=2, cp_comm="ring"),
    row("llama", merged(LONG, RAGGED, FOUR), FULL, cp=2, pp=2, cp_comm="ring"),
    row("llama", merged(LONG, RAGGED), moe(capacity_factor=0.75), cp=2, ep=2),
]
LONG_ROWS = [
    *(
        row(family, merged(LONGER, data), cp=3, cp_comm=comm)
        for family, data in (("gpt2", {}), ("llama", RAGGED), ("qwen3", RAGGED))
        for comm in ("ring", "allgather")
    ),
    *(
        row("llama", merged(LONG, {"train": {"seq_length": 128}}, data), cp=4, cp_comm=comm)
        for data in ({}, RAGGED)
        for comm in ("ring", "allgather", "alltoall", "alltoall+ring")
    ),
    *(
        row("llama", merged(LONG, RAGGED), cp=2, tp=2, cp_comm=comm, sequence_parallel=sequence_parallel)
        for comm in ("ring", "allgather", "alltoall")
        for sequence_parallel in (False, True)
    ),
    row("qwen3", LONG, cp=2, cp_comm="alltoall"),  # one key-value head for two ranks
    row("llama", merged(LONG, FOUR), cp=2, pp=2, vpp=2, cp_comm="allgather"),
    row("llama", merged(LONG, FOUR), cp=2, pp=2, cp_comm="ring", schedule="zb-h1"),
    row("llama", merged(LONG, FOUR, RAGGED), cp=2, pp=2, tp=2),
    row("llama", merged(LONG, RAGGED), {"optimizer": {"instances": 2}}, cp=2, dp=2),
    row("llama", merged(LONG, RAGGED), {"optimizer": {"zero": 0}}, cp=2, dp=2, order="cp-tp-dp-pp"),
    row("llama", LONG, {"train": {"compile": True}}, cp=2, cp_comm="ring"),
    row("llama", merged(LONG, RAGGED), {"train": {"compile": True}}, cp=2, cp_comm="allgather"),
    row("llama", LONG, moe(aux_loss="sequence"), cp=2, tp=2, etp=1, ep=4),
    row("llama", merged(LONG, RAGGED), moe(**SIGMOID), cp=2, dp=2, ep=4, cp_comm="ring"),
    row("llama", merged(LONG, RAGGED), moe(capacity_factor=0.75), cp=2, tp=2, etp=2, order="cp-tp-ep-dp-pp"),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_train_like_one_process(workplace: Workplace, row: Row) -> None:
    matrix.assert_equal(workplace, row)


Mutant = Callable[[ParallelContext, Config], None]


def _change_parts(change: Callable[[Batch, CpShard], Batch]) -> None:
    part = Batch.part
    Batch.part = lambda self, share: change(part(self, share), share)  # type: ignore[method-assign]


def labels_shifted_after_the_cut(context: ParallelContext, config: Config) -> None:
    """The label of a part's token is the next token of the part."""
    _change_parts(lambda batch, share: replace(batch, labels=batch.tokens.roll(-1, 1)))


def positions_local(context: ParallelContext, config: Config) -> None:
    def local(batch: Batch, share: CpShard) -> Batch:
        return replace(batch, positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.positions))

    _change_parts(local)


def dropout_at_local_places(context: ParallelContext, config: Config) -> None:
    _change_parts(lambda batch, share: replace(batch, places=torch.arange(len(batch.places))))


def documents_leak(context: ParallelContext, config: Config) -> None:
    masked = _Tiles.mask

    def causal_alone(self: _Tiles, tile: Tile, source: int) -> Tensor | None:
        documents, self._documents = self._documents, torch.zeros_like(self._documents)  # type: ignore[arg-type]
        mask = masked(self, tile, source)
        self._documents = documents
        return mask

    _Tiles.mask = causal_alone  # type: ignore[method-assign]


def loss_divided_by_cp_again(context: ParallelContext, config: Config) -> None:
    loss = GPT.loss
    GPT.loss = lambda self, batch, scale, received=None: loss(self, batch, scale / config.parallel.cp, received)  # type: ignore[method-assign]


def own_labels_are_the_sequence_s(context: ParallelContext, config: Config) -> None:
    """Routers take the labels that count on their rank for those of the whole sequence."""
    _change_parts(lambda batch, share: replace(batch, counted=batch.loss_mask.sum(1)))


BROKEN: list[tuple[Mutant, Row]] = [
    (labels_shifted_after_the_cut, row("llama", LONG, cp=2)),
    (positions_local, row("gpt2", LONG, cp=2, cp_comm="ring")),
    (documents_leak, row("llama", merged(LONG, RAGGED), cp=2, cp_comm="ring")),
    (mutants.no_sum_inside_instances, row("llama", LONG, cp=2)),
    (loss_divided_by_cp_again, row("llama", LONG, cp=2)),
]
LONG_BROKEN: list[tuple[Mutant, Row]] = [
    (positions_local, row("llama", LONG, cp=2, cp_comm="ring")),
    (dropout_at_local_places, row("llama", merged(LONG, RESIDUAL), cp=2, cp_comm="ring")),
    (own_labels_are_the_sequence_s, row("llama", merged(LONG, RAGGED), moe(), cp=2)),
]


@matrix.mutants_of(BROKEN, LONG_BROKEN)
def test_a_broken_layout_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)


def texts(context: ParallelContext, config: Config) -> list[list[int]]:
    config = derive_device(derive_vocabulary(config, 257), context)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    return sample(training, context, [[3, 1, 4], [7]], 12, seq_length=config.train.seq_length, seed=2)


@pytest.mark.parametrize("comm", ["ring", "allgather", "alltoall"])
def test_texts_are_those_of_one_process(workplace: Workplace, comm: str) -> None:
    expected = texts(ParallelContext(dtype=torch.float64), row("llama", LONG).config(workplace))
    assert len({*expected[0]}) > 3, "a text that can differ"
    assert matrix.train_row(workplace, row("llama", LONG, cp=2, cp_comm=comm), texts) == [expected] * 2


def refused(context: ParallelContext, config: Config, number: int) -> list[tuple[bool, bool]]:
    """Whether steps were skipped and refused, on a rank that cannot read its text if it is of this number."""
    data = open_data(config, prepare(config))
    config = derive_device(derive_vocabulary(config, data.train.vocab_size), context)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    step = TrainStep(training, config.optimizer, context)

    def unreadable(*_: Any) -> Any:
        raise UserError(Problem("data.path", "text", "cannot be read", "another"))

    if context.rank == number:
        SampleSource.read = unreadable  # type: ignore[method-assign]
    plan, share = planned_steps(config.train, done=0, samples=0), data_share(context)
    with train_batches(data.train, config, plan, context.device, share) as batches:
        found = [
            step(each.microbatches, each.local_tokens, 1e-3, refused=bool(each.problems)).read()
            for each in islice(batches, 2)
        ]
    return [(figures.skipped, figures.refused) for figures in found]


@pytest.mark.parametrize("comm", ["ring", "allgather"])
def test_input_that_one_rank_cannot_read_is_refused_by_all(workplace: Workplace, comm: str) -> None:
    """Their plans follow the documents, which the rank without text knows, too."""
    its = row("llama", merged(LONG, RAGGED), cp=2, cp_comm=comm)
    found = matrix.train_row(workplace, its, partial(refused, number=1))
    assert found == [[(True, True)] * 2] * 2


def half_precision(context: ParallelContext, config: Config) -> list[float]:
    context = replace(context, dtype=getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[config.precision]))
    return train(context, config).losses


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_half_precision_is_near_fp64(workplace: Workplace, precision: str) -> None:
    its = row("llama", merged(LONG, RAGGED), cp=2, cp_comm="ring")
    expected = its.reference(workplace).losses
    config = replace(its.config(workplace), precision=precision)
    ranks = {"layout": its.layout, "needs": needs_of(config), "dtype": torch.float64}
    for losses in run_ranks(half_precision, 2, config, **ranks):
        torch.testing.assert_close(losses[:3], expected[:3], rtol=2e-2, atol=0)
