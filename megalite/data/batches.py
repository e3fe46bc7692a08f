"""Reads samples as microbatches onto the device, ahead of the step that needs them.

A global batch holds the samples after those of the batches before it, as many as its step takes (step_plan.py), and its
microbatch j micro_batch_size of them in order. Data-parallel rank r takes the microbatches j with j % dp_size == r, and
of each sequence its part where ranks of cp share it. A run's position in the data is the samples that it has consumed.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep
from megalite.data.batch import Batch, whole_batch
from megalite.data.samples import SampleSource
from megalite.errors.problems import Problem, UserError
from megalite.layout.sequence import CpShard

AHEAD = 2  # steps that are read in advance


class DataShare(NamedTuple):
    """The part of each global batch that a rank reads: that of data-parallel rank `rank` of `size`, and of its
    sequences those tokens that `sequence` names."""

    rank: int = 0
    size: int = 1
    sequence: CpShard = CpShard()


ALL = DataShare()


@dataclass(frozen=True)
class StepBatches:
    """One rank's share of the global batch of a step. `local_tokens` counts its labels that enter the loss.

    A step that is skipped has no microbatches. Where data is refused, `problems` say why, and no label of it enters the
    loss: the other ranks of the model compute with these microbatches.
    """

    planned: PlannedStep
    microbatches: list[Batch]
    local_tokens: int
    problems: list[Problem] = field(default_factory=list)
    wait_s: float = 0.0  # how long the step waited for its data


def read_batch(
    source: SampleSource, first: int, size: int, config: Config, problems: list[Problem] | None = None
) -> Batch:
    """The samples from `first` on, `size` of them, as one microbatch on the CPU. If they are refused, `problems` get
    the reasons unless the list has some, and the microbatch has the same shape without a label in the loss."""
    indices, length = np.arange(first, first + size), source.seq_length
    mask, positions, documents = np.ones((size, length), dtype=bool), torch.arange(length)[None], None
    apart = not config.data.cross_document_attention
    if apart:
        documents, positions = torch.zeros((size, length), dtype=torch.int32), positions.repeat(size, 1)
    try:
        if apart:  # first: ranks that share sequences must agree on the documents
            documents, positions = map(torch.from_numpy, source.documents(*source.places(indices)))
        rows, parts, _ = source.read(indices)  # [b, s + 1], [b]
        if config.data.mask_end_of_document and source.end_of_document is not None:
            mask = rows[:, 1:] != source.end_of_document
    except UserError as error:
        if problems is None:
            raise
        problems += [] if problems else error.problems  # the first say enough
        rows, mask, parts = np.zeros((size, length + 1), dtype=np.int64), np.zeros_like(mask), np.zeros_like(indices)
    tokens, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (rows[:, :-1], rows[:, 1:]))
    batch = whole_batch(tokens, labels, torch.from_numpy(mask), positions, documents, first)
    return replace(batch, sources=torch.from_numpy(parts)) if len(source.parts) > 1 else batch


def local_batches(
    source: SampleSource, config: Config, samples: range, share: DataShare, problems: list[Problem] | None = None
) -> list[Batch]:
    """The microbatches, of whole sequences, that a rank computes of the `samples` of a global batch."""
    size = config.train.micro_batch_size
    assert len(samples) // size % share.size == 0, (samples, size, share)
    starts = samples[share.rank * size :: share.size * size]
    return [read_batch(source, start, size, config, problems) for start in starts]


@contextmanager
def train_batches(
    source: SampleSource, config: Config, steps: Iterable[PlannedStep], device: torch.device, share: DataShare = ALL
) -> Iterator[Iterator[StepBatches]]:
    """The microbatches of the `steps`, on the device. A thread reads ahead; its failure surfaces at the step."""

    def read(step: PlannedStep) -> StepBatches:
        if step.skipped:
            return StepBatches(step, [], 0)  # not even read: its samples may be what is wrong
        problems: list[Problem] = []
        batches = local_batches(source, config, range(step.first, step.first + step.sequences), share, problems)
        batches = [batch.part(share.sequence) for batch in batches]
        tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        batches = [batch.map(Tensor.pin_memory) if device.type == "cuda" else batch for batch in batches]
        return StepBatches(step, batches, tokens, problems)

    def arriving() -> Iterator[StepBatches]:
        while ahead:
            begin = time.perf_counter()
            batches = ahead.popleft().result()
            wait_s = time.perf_counter() - begin
            ahead.extend(reader.submit(read, step) for step in islice(coming, 1))
            yield replace(batches, microbatches=[it.to(device) for it in batches.microbatches], wait_s=wait_s)

    coming, reader = iter(steps), ThreadPoolExecutor(1, "batches")
    ahead = deque(reader.submit(read, step) for step in islice(coming, AHEAD))
    try:
        yield arriving()
    finally:
        reader.shutdown(cancel_futures=True)


def validation_batches(
    source: SampleSource, config: Config, device: torch.device, share: DataShare = ALL
) -> Iterator[list[Batch]]:
    """This rank's share of each validation batch, always the same. The last batch is filled up with rows that do not
    enter the loss, so that all ranks have batches of one shape and no sample is left out."""
    size = config.train.global_batch_size
    samples = min(config.train.eval_batches * size, source.without_repeats())
    for first in range(0, samples, size):
        batches = local_batches(source, config, range(first, first + size), share)
        for at, batch in enumerate(batches):
            real = batch.samples < samples
            batches[at] = batch.with_mask(batch.loss_mask & real.unsqueeze(1)).part(share.sequence).to(device)
        yield batches
