"""Losses and tokens by part of a blend: by a plain definition, and on every layout those of one process, in fp64."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.derive import derive_vocabulary
from megalite.config.schema import Config
from megalite.config.step_plan import planned_steps
from megalite.data.batch import Batch
from megalite.data.batches import train_batches
from megalite.data.open import open_data
from megalite.launch.context import ParallelContext
from megalite.model.gpt import GPT
from megalite.prepare.prepare import prepare
from megalite.train.build import build_training, derive_device, fill_with_start_values
from megalite.train.step import TrainStep
from tests.layouts import matrix
from tests.layouts.matrix import FOUR, Row, Workplace, row
from tests.layouts.mutants import Mutant
from tests.layouts.training import Overrides, small_config

PARTS = ["text.jsonl", "web.jsonl", "code.jsonl"]
BLEND: Overrides = {"data": {"path": PARTS, "weights": [0.5, 0.2, 0.3], "mask_end_of_document": True}}
LONG: Overrides = {"train": {"seq_length": 64}}  # for a ring
EXTRAS: Overrides = {"train": {"label_smoothing": 0.1, "z_loss": 0.01}}
CHUNKED: Overrides = {"model": {"loss_chunk_tokens": 7}}
ROWS = [
    row("llama", BLEND, CHUNKED, dp=2),
    row("gpt2", BLEND, EXTRAS, tp=2),
    row("llama", BLEND, CHUNKED, tp=2, sequence_parallel=False),
    row("llama", BLEND, FOUR, pp=2, vpp=2),
    row("qwen3", BLEND, LONG, cp=2, cp_comm="ring"),
    row("llama", BLEND, LONG, cp=2, tp=2, cp_comm="alltoall"),
]
LONG_ROWS = [
    row("gpt2", BLEND, FOUR, pp=2, dp=2, schedule="zb-h1"),
    row("llama", BLEND, LONG, pp=2, cp=2, tp=2),
    row("llama", BLEND, {"train": {"compile": True, "recompute": "full"}}, dp=2),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_count_like_one_process(workplace: Workplace, row: Row) -> None:
    reference = row.reference(workplace)
    assert [sources.shape for sources in reference.sources] == [(3, 2)] * len(reference.losses)
    for sources, loss, tokens in zip(reference.sources, reference.losses, reference.tokens, strict=True):
        total_loss, total = sources.sum(0).tolist()
        assert total == tokens
        torch.testing.assert_close(total_loss / total, loss, rtol=1e-12, atol=0)
    assert max(float(sources.min()) for sources in reference.sources) > 0, "a part without a sample would hide mistakes"
    matrix.assert_equal(workplace, row)


def test_a_part_has_the_losses_of_its_samples(workplace: Workplace) -> None:
    """The first step, before the update: a sum over the samples of each part, of torch's own cross entropy."""
    config = small_config(*workplace, data=BLEND["data"], train={"micro_batch_size": 3})
    data = open_data(config, prepare(config))
    context = ParallelContext(dtype=torch.float64)
    config = derive_device(derive_vocabulary(config, data.train.vocab_size), context)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    with train_batches(data.train, config, planned_steps(config.train, done=0, samples=0), context.device) as steps:
        step = next(steps)
    expected = torch.zeros(3, 2, dtype=torch.float64)
    [model] = training.chunks
    for batch in step.microbatches:
        with torch.no_grad(), training.evaluating():
            logits = model.logits(batch)
        parts, _ = data.train.places(batch.samples.numpy())
        for at, part in enumerate(parts):
            kept = batch.labels[at] != data.train.end_of_document
            expected[part, 0] += F.cross_entropy(logits[at][kept], batch.labels[at][kept], reduction="sum")
            expected[part, 1] += kept.sum()
    train_step = TrainStep(training, config.optimizer, context)
    for _ in range(2):  # a step forgets what the step before counted
        found = train_step(step.microbatches, step.local_tokens, 0.0).read().sources
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with training.evaluating():
        training.executor.evaluate(step.microbatches, torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(model.source_sums, expected, rtol=1e-12, atol=1e-12)  # an evaluation counts nothing


def masked_tokens_count(context: ParallelContext, config: Config) -> None:
    _change(lambda self, batch, losses: (replace(batch, loss_mask=torch.ones_like(batch.loss_mask)), losses))


def whole_sequences_count(context: ParallelContext, config: Config) -> None:
    """Each rank that has a part of a sequence counts all of its labels."""

    def change(self: GPT, batch: Batch, losses: Tensor) -> tuple[Batch, Tensor]:
        return replace(batch, loss_mask=batch.counted[:, None]), losses

    _change(change)


def losses_in_the_order_of_sequences(context: ParallelContext, config: Config) -> None:
    _change(lambda self, batch, losses: (batch, losses.view(len(batch.samples), -1).t().reshape(-1)))


def every_rank_of_tp_counts(context: ParallelContext, config: Config) -> None:
    def change(self: GPT, batch: Batch, losses: Tensor) -> tuple[Batch, Tensor]:
        self.place = replace(self.place, tp=None)  # of which only the count reads it from here on
        return batch, losses

    _change(change)


def _change(change: Callable[[GPT, Batch, Tensor], tuple[Batch, Tensor]]) -> None:
    right = GPT._add_by_source

    def changed(self: GPT, batch: Batch, losses: Tensor) -> None:
        place = self.place
        right(self, *change(self, batch, losses))
        self.place = place

    GPT._add_by_source = changed  # type: ignore[method-assign]


BROKEN: list[tuple[Mutant, Row]] = [
    (masked_tokens_count, ROWS[0]),
    (losses_in_the_order_of_sequences, ROWS[0]),
    (every_rank_of_tp_counts, ROWS[2]),
    (whole_sequences_count, ROWS[4]),
]


@matrix.mutants_of(BROKEN)
def test_a_broken_count_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)
