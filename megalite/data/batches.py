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
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch

from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep
from megalite.data.batch import Batch, unscored, whole_batch
from megalite.data.samples import SampleSource
from megalite.errors.problems import Problem, UserError
from megalite.layout.sequence import SequenceShare

WHOLE = SequenceShare()
AHEAD = 2  # steps that are read in advance


@dataclass(frozen=True)
class StepBatches:
    """One rank's share of the global batch of a step. `local_tokens` counts its labels that enter the loss.

    A step that is skipped has no microbatches. Where the data is refused, `problems` say why, and the microbatches are
    `masked_batches`: the other ranks of the model compute with them, and learn of the refusal in their step.
    """

    planned: PlannedStep
    microbatches: list[Batch]
    local_tokens: int
    wait_s: float = 0.0  # how long the step waited for its data
    problems: list[Problem] = field(default_factory=list)


def read_batch(source: SampleSource, first: int, size: int, config: Config) -> Batch:
    """The samples from `first` on, `size` of them, as one microbatch on the CPU."""
    rows, parts, starts = source.read(np.arange(first, first + size))  # [b, s + 1]
    mask = np.ones((size, source.seq_length), dtype=bool)
    if config.data.mask_end_of_document and source.end_of_document is not None:
        mask = rows[:, 1:] != source.end_of_document
    positions, documents = torch.arange(source.seq_length).expand(size, -1), None
    if not config.data.cross_document_attention:
        documents, positions = map(torch.from_numpy, source.documents(parts, starts))
    tokens, labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in (rows[:, :-1], rows[:, 1:]))
    return whole_batch(tokens, labels, torch.from_numpy(mask), positions, documents, first)


def local_batches(
    source: SampleSource, config: Config, first: int, sequences: int, *, dp_rank: int, dp_size: int
) -> list[Batch]:
    """The microbatches that one data-parallel rank computes of the global batch of the `sequences` samples from `first`
    on."""
    starts = _first_samples(config, first, sequences, dp_rank, dp_size)
    return [read_batch(source, start, config.train.micro_batch_size, config) for start in starts]


def _first_samples(config: Config, first: int, sequences: int, dp_rank: int, dp_size: int) -> list[int]:
    """The first sample of each microbatch of one data-parallel rank."""
    size = config.train.micro_batch_size
    count = sequences // size
    assert count % dp_size == 0, (count, dp_size)
    return [first + microbatch * size for microbatch in range(dp_rank, count, dp_size)]


def masked_batches(config: Config, sequences: int, dp_size: int) -> list[Batch]:
    """Microbatches in the place of those that cannot be read: as many, of the same shapes, no label in the loss. On the
    CPU."""
    size = config.train.micro_batch_size
    batch = unscored(torch.zeros(size, config.train.seq_length, dtype=torch.int64))
    if not config.data.cross_document_attention:
        documents = torch.zeros(batch.tokens.shape, dtype=torch.int32)
        batch = replace(batch, positions=batch.positions.contiguous(), documents=documents)
    return [batch] * (sequences // size // dp_size)


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
        sequence: SequenceShare = WHOLE,
    ) -> None:
        self._source, self._config, self._rank, self._size = source, config, dp_rank, dp_size
        self._sequence = sequence
        self._device, self._steps = device, iter(steps)
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
        try:
            batches = local_batches(
                self._source, self._config, step.first, step.sequences, dp_rank=self._rank, dp_size=self._size
            )
        except UserError as error:
            batches, problems = self._masked(step), error.problems
        batches = [batch.part(self._sequence) for batch in batches]
        tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        batches = [it.pinned() if self._device.type == "cuda" else it for it in batches]
        return StepBatches(step, batches, tokens, problems=problems)

    def _masked(self, step: PlannedStep) -> list[Batch]:
        """Microbatches in the place of a step that is refused, with the documents where these can be read: ranks that
        share sequences know by documents what they get from each other."""
        batches = masked_batches(self._config, step.sequences, self._size)
        if not self._config.data.cross_document_attention:
            firsts = _first_samples(self._config, step.first, step.sequences, self._rank, self._size)
            with suppress(UserError):
                return [_with_documents(it, self._source, first) for it, first in zip(batches, firsts, strict=True)]
        return batches


def _with_documents(batch: Batch, source: SampleSource, first: int) -> Batch:
    """The batch with documents and positions of the samples from `first` on."""
    places = source.places(np.arange(first, first + len(batch.tokens)))
    documents, positions = map(torch.from_numpy, source.documents(*places))
    return replace(batch, documents=documents, positions=positions)


def validation_batches(
    source: SampleSource,
    config: Config,
    *,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    sequence: SequenceShare = WHOLE,
) -> Iterator[list[Batch]]:
    """This rank's share of each validation batch, always the same. The last one is filled up with rows that do not
    enter the loss, so that every rank has its share of the one shape, and no sample is left out for the batch's sake.
    """
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
