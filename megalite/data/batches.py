"""Reads samples as microbatches onto the device, ahead of the step that needs them.

A global batch holds the samples after those of the batches before it, as many as its step takes (step_plan.py). Its
microbatch j holds micro_batch_size of them in order. Data-parallel rank r takes the microbatches j with
j % dp_size == r, and of each sequence its part where ranks of cp share it. Where a run stands in its data is one
number: the samples that it has consumed.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch

from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep
from megalite.data.batch import Batch, whole_batch
from megalite.data.samples import SampleSource
from megalite.errors.problems import Problem, UserError
from megalite.layout.sequence import CpShard

WHOLE = CpShard()
AHEAD = 2  # steps that are read in advance


@dataclass(frozen=True)
class StepBatches:
    """One rank's share of the global batch of a step. `local_tokens` counts its labels that enter the loss.

    A step that is skipped has no microbatches. Where the data is refused, `problems` say why, and no label of what was
    not read enters the loss: the other ranks of the model compute with these microbatches, and learn of the refusal in
    their step.
    """

    planned: PlannedStep
    microbatches: list[Batch]
    local_tokens: int
    wait_s: float = 0.0  # how long the step waited for its data
    problems: list[Problem] = field(default_factory=list)


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
        rows, *_ = source.read(indices)  # [b, s + 1]
        if config.data.mask_end_of_document and source.end_of_document is not None:
            mask = rows[:, 1:] != source.end_of_document
    except UserError as error:
        if problems is None:
            raise
        problems += [] if problems else error.problems  # the first say enough
        rows, mask = np.zeros((size, length + 1), dtype=np.int64), np.zeros_like(mask)
    tokens, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (rows[:, :-1], rows[:, 1:]))
    return whole_batch(tokens, labels, torch.from_numpy(mask), positions, documents, first)


def local_batches(
    source: SampleSource,
    config: Config,
    first: int,
    sequences: int,
    *,
    dp_rank: int,
    dp_size: int,
    problems: list[Problem] | None = None,
) -> list[Batch]:
    """The microbatches that one data-parallel rank computes of the global batch of the `sequences` samples from `first`
    on."""
    size = config.train.micro_batch_size
    assert sequences // size % dp_size == 0, (sequences, size, dp_size)
    starts = range(first + dp_rank * size, first + sequences, dp_size * size)
    return [read_batch(source, start, size, config, problems) for start in starts]


class TrainBatches(Iterator[StepBatches], AbstractContextManager["TrainBatches"]):
    """Iterates over the `steps`; a thread reads their microbatches ahead. Close it, or use it as a context."""

    def __init__(
        self,
        source: SampleSource,
        config: Config,
        steps: Iterable[PlannedStep],
        *,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
        sequence: CpShard = WHOLE,
    ) -> None:
        self._read_local = partial(local_batches, source, config, dp_rank=dp_rank, dp_size=dp_size)
        self._sequence, self._device, self._steps = sequence, device, iter(steps)
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead = deque(self._reader.submit(self._read, step) for step in islice(self._steps, AHEAD))

    def __next__(self) -> StepBatches:
        """The next step's microbatches, on the device. A failure of the reading thread surfaces here, at its step, and
        stays."""
        if not self._ahead:
            raise StopIteration
        begin = time.perf_counter()
        batches = self._ahead[0].result()
        wait_s = time.perf_counter() - begin
        self._ahead.popleft()
        self._ahead.extend(self._reader.submit(self._read, step) for step in islice(self._steps, 1))
        return replace(batches, microbatches=[it.to(self._device) for it in batches.microbatches], wait_s=wait_s)

    def close(self) -> None:
        """End the thread; steps that it has not begun to read stay unread."""
        self._reader.shutdown(cancel_futures=True)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, step: PlannedStep) -> StepBatches:
        if step.skipped:
            return StepBatches(step, [], 0)  # not even read: its samples may be what is wrong
        problems: list[Problem] = []
        batches = self._read_local(step.first, step.sequences, problems=problems)
        batches = [batch.part(self._sequence) for batch in batches]
        tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        batches = [it.pinned() if self._device.type == "cuda" else it for it in batches]
        return StepBatches(step, batches, tokens, problems=problems)


def validation_batches(
    source: SampleSource,
    config: Config,
    *,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    sequence: CpShard = WHOLE,
) -> Iterator[list[Batch]]:
    """This rank's share of each validation batch, always the same. The last batch is filled up with rows that do not
    enter the loss, so that all ranks have batches of one shape and no sample is left out."""
    size, samples = config.train.global_batch_size, validation_samples(source, config)
    for first in range(0, samples, size):
        batches = local_batches(source, config, first, size, dp_rank=dp_rank, dp_size=dp_size)
        for at, batch in enumerate(batches):
            real = torch.arange(len(batch.tokens)) < samples - batch.first_sample
            batches[at] = batch.with_mask(batch.loss_mask & real.unsqueeze(1)).part(sequence).to(device)
        yield batches


def validation_samples(source: SampleSource, config: Config) -> int:
    """How many samples an evaluation takes: train.eval_batches global batches from the front, or all there are."""
    return min(config.train.eval_batches * config.train.global_batch_size, source.without_repeats())
