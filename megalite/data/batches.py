"""Samples as microbatches on the device, read ahead of the step that needs them.

A global batch holds the samples after those of the batches before it, as many as its step takes (step_plan.py); its
microbatch j holds micro_batch_size of them in order. A layout only decides who reads which: data-parallel rank r takes
the microbatches j with j % dp_size == r. Where a run stands in its data is one number, the samples that it has
consumed: batch sizes may change while it lasts, and when it continues.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep
from megalite.data.batch import Batch
from megalite.data.samples import SampleSource

AHEAD = 2  # steps that are read in advance
TICK = 0.1  # seconds between two looks at whether to stop


@dataclass(frozen=True)
class StepBatches:
    """One rank's share of a global batch. `local_tokens` counts its labels that enter the loss."""

    microbatches: list[Batch]
    local_tokens: int
    wait_s: float  # how long the step waited for its data


def read_batch(source: SampleSource, first: int, size: int, config: Config) -> Batch:
    """The samples from `first` on, `size` of them, as one microbatch on the CPU."""
    rows, parts, starts = source.read(np.arange(first, first + size))
    labels = rows[:, 1:]
    mask = np.ones(labels.shape, dtype=bool)
    if config.data.mask_end_of_document and source.end_of_document is not None:
        mask = labels != source.end_of_document
    documents, positions = None, torch.arange(source.seq_length).expand(len(rows), -1)
    if not config.data.cross_document_attention:
        documents, of_documents = source.documents(parts, starts)
        positions = torch.from_numpy(of_documents)
    return Batch(
        tokens=torch.from_numpy(np.ascontiguousarray(rows[:, :-1])),
        labels=torch.from_numpy(np.ascontiguousarray(labels)),
        loss_mask=torch.from_numpy(mask),
        positions=positions,
        documents=None if documents is None else torch.from_numpy(documents),
        first_sample=first,
    )


def local_batches(
    source: SampleSource, config: Config, first: int, sequences: int, *, dp_rank: int, dp_size: int
) -> list[Batch]:
    """The microbatches that one data-parallel rank computes of the global batch of the `sequences` samples from `first`
    on."""
    size = config.train.micro_batch_size
    assert size is not None, "derive() fills it in"
    count = sequences // size
    assert count % dp_size == 0, (count, dp_size)
    starts = [first + microbatch * size for microbatch in range(dp_rank, count, dp_size)]
    return [read_batch(source, start, size, config) for start in starts]


def masked_batches(config: Config, sequences: int, dp_size: int, device: torch.device) -> list[Batch]:
    """What stands in for a rank's microbatches of a global batch that cannot be read: as many, of the same shapes, none
    of it in the loss."""
    size = config.train.micro_batch_size
    assert size is not None, "derive() fills it in"
    tokens = torch.zeros((size, config.train.seq_length), dtype=torch.int64)
    positions = torch.arange(config.train.seq_length).expand(size, -1)
    batch = Batch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.zeros_like(tokens, dtype=torch.bool),
        positions=positions if config.data.cross_document_attention else positions.contiguous(),
        documents=None if config.data.cross_document_attention else torch.zeros_like(tokens, dtype=torch.int32),
        first_sample=0,
    ).to(device)
    return [batch] * (sequences // size // dp_size)


class TrainBatches:
    """Iterates over those of the `steps` that train; a thread reads ahead. Close it, or use it as a context."""

    def __init__(
        self,
        source: SampleSource,
        config: Config,
        steps: Iterable[PlannedStep],
        *,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
    ) -> None:
        self._source, self._config, self._rank, self._size = source, config, dp_rank, dp_size
        self._device, self._steps = device, steps
        self._ready: queue.Queue[tuple[list[Batch], int] | Exception] = queue.Queue(maxsize=AHEAD)
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read_ahead, name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[StepBatches]:
        return self

    def __next__(self) -> StepBatches:
        """The next step's microbatches; a failure of the reading thread surfaces here, at its step."""
        begin = time.perf_counter()
        if self._failure:
            raise self._failure
        item = self._take()
        if isinstance(item, Exception):
            self._failure = item
            raise item
        microbatches, tokens = item
        wait = time.perf_counter() - begin
        return StepBatches([batch.to(self._device) for batch in microbatches], tokens, wait)

    def close(self) -> None:
        """End the thread, whatever it waits for."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> "TrainBatches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> tuple[list[Batch], int] | Exception:
        while not self._stop.is_set():
            try:
                return self._ready.get(timeout=TICK)
            except queue.Empty:
                continue
        raise StopIteration

    def _read_ahead(self) -> None:
        try:
            for step in self._steps:
                if step.skipped:
                    continue  # not even read: its samples may be what is wrong
                batches = local_batches(
                    self._source, self._config, step.first, step.sequences, dp_rank=self._rank, dp_size=self._size
                )
                tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
                if self._device.type == "cuda":
                    batches = [batch.pinned() for batch in batches]
                if not self._put((batches, tokens)):
                    return
            self._put(StopIteration())
        except Exception as error:  # whatever it is belongs to the step that waits for it
            self._put(error)

    def _put(self, item: tuple[list[Batch], int] | Exception) -> bool:
        """Hand over one item; False if nobody wants it any more."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=TICK)
                return True
            except queue.Full:
                continue
        return False


def validation_batches(
    source: SampleSource, config: Config, *, dp_rank: int, dp_size: int, device: torch.device
) -> Iterator[list[Batch]]:
    """This rank's share of each validation batch, always the same: train.eval_batches global batches from the front, or
    as many as there are. Fewer samples than one global batch are filled up with rows that do not enter the loss, so
    that every rank has its share of the one shape."""
    size = config.train.global_batch_size
    held = source.without_repeats()
    for first in range(0, min(config.train.eval_batches, held // size) * size, size):
        batches = local_batches(source, config, first, size, dp_rank=dp_rank, dp_size=dp_size)
        yield [batch.to(device) for batch in batches]
    if held < size:
        batches = local_batches(source, config, 0, size, dp_rank=dp_rank, dp_size=dp_size)
        for batch in batches:
            batch.loss_mask[max(0, held - batch.first_sample) :] = False
        yield [batch.to(device) for batch in batches]
