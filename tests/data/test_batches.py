"""The stream of microbatches is one, whoever computes it and wherever it starts."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep, planned_steps
from megalite.data.batch import Batch
from megalite.data.batches import DataShare, local_batches, train_batches, validation_batches
from megalite.data.open import OpenedData, open_data
from megalite.errors.problems import Problem, UserError
from megalite.prepare.prepare import prepare

WriteTokens = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture
def data(config: Config, write_tokens: WriteTokens) -> OpenedData:
    config.data.source = "tokens"
    config.data.path = [
        str(write_tokens(name, [list(range(first, first + 400))] * 3)) for name, first in (("a", 0), ("b", 400))
    ]
    config.data.weights = [2.0, 1.0]
    return open_data(config, prepare(config))


def steps_of(config: Config) -> Iterator[PlannedStep]:
    return planned_steps(config.train, done=0, samples=0)


def stream(
    data: OpenedData, config: Config, steps: int, *, rank: int = 0, size: int = 1, start: int = 0
) -> list[Batch]:
    plan = islice(steps_of(config), start, None)
    with train_batches(data.train, config, plan, CPU, DataShare(rank, size)) as batches:
        return [batch for _ in range(steps) for batch in next(batches).microbatches]


def content(batches: list[Batch]) -> dict[int, list[list[int]]]:
    return {int(batch.samples[0]): torch.cat([batch.tokens, batch.labels], dim=1).tolist() for batch in batches}


def test_labels_are_the_next_tokens_and_positions_count(data: OpenedData, config: Config) -> None:
    for batch in stream(data, config, 2):
        assert batch.tokens.shape == batch.labels.shape == (2, 16)
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        assert batch.positions.tolist() == [list(range(16))]
        assert batch.loss_mask.all()
        assert batch.documents is None
        assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_compute_the_microbatches_of_one_process(data: OpenedData, config: Config, size: int) -> None:
    whole = stream(data, config, 5)
    assert [batch.samples.tolist() for batch in whole] == [[first, first + 1] for first in range(0, 40, 2)]
    shared = [stream(data, config, 5, rank=rank, size=size) for rank in range(size)]
    assert {len(batches) for batches in shared} == {20 // size}
    together = [batch for batches in shared for batch in batches]
    assert content(together) == content(whole)
    assert len(together) == len(whole)


@pytest.mark.parametrize("start", [1, 7, 40])
def test_resuming_at_a_step_continues_the_stream(data: OpenedData, config: Config, start: int) -> None:
    whole = stream(data, config, start + 3)  # several epochs
    assert content(stream(data, config, 3, start=start)) == content(whole[4 * start :])


def test_what_is_passed_over_is_not_even_read(data: OpenedData, config: Config) -> None:
    """A bad shard does not end a run that knows of it."""
    whole = stream(data, config, 5)
    broken = {int(batch.samples[0]) for batch in whole[4:12]}  # of the second and the third step
    config.train.skip_steps = [2, 3]
    read: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(data.train, name)

        def read(self, indices: Any) -> Any:
            read.append(int(indices[0]))
            return data.train.read(indices)

    with train_batches(Watched(), config, steps_of(config), CPU) as batches:  # type: ignore[arg-type]
        trained = [batch for _ in range(5) for batch in next(batches).microbatches]
    assert content(trained) == content(whole[:4] + whole[12:])
    assert not broken & set(read)


def test_the_steps_of_a_run_end_and_so_does_the_thread(data: OpenedData, config: Config) -> None:
    before, steps = threading.active_count(), list(islice(steps_of(config), 3))
    with train_batches(data.train, config, steps, CPU) as batches:
        assert len(list(batches)) == 3
        assert next(batches, None) is None
    assert threading.active_count() == before


def test_end_of_document_labels_leave_the_loss_if_asked(tmp_path: Path, config: Config) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefg"}\n' * 300)
    config.data.path = str(tmp_path / "a.jsonl")
    config.data.mask_end_of_document = True
    opened = open_data(config, prepare(config))
    with train_batches(opened.train, config, steps_of(config), CPU) as batches:
        step = next(batches)
    for batch in step.microbatches:
        assert torch.equal(batch.loss_mask, batch.labels != 256)
        assert not batch.loss_mask.all()
    assert step.local_tokens == sum(int(batch.loss_mask.sum()) for batch in step.microbatches) == 8 * 16 * 7 // 8


def test_validation_is_the_front_of_the_held_out_tokens_every_time(config: Config, write_tokens: WriteTokens) -> None:
    config.data.source, config.data.path = "tokens", str(write_tokens("a", [list(range(1000))] * 4))
    source = open_data(config, prepare(config)).validation
    assert source is not None
    runs = [list(validation_batches(source, config, CPU)) for _ in range(2)]
    assert len(runs[0]) == 2  # eval_batches
    assert [content(step) for step in runs[0]] == [content(step) for step in runs[1]]
    inputs = torch.cat([batch.tokens for step in runs[0] for batch in step]).flatten()
    assert torch.equal(inputs, (torch.arange(16 * 16) + 3600) % 1000)
    shared = [list(validation_batches(source, config, CPU, DataShare(rank, 2))) for rank in range(2)]
    assert content([b for run in shared for step in run for b in step]) == content(
        [b for step in runs[0] for b in step]
    )


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (4, 2), (8, 2), (10, 1), (16, 4)])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_every_held_out_sample_is_evaluated_once_whatever_the_batch_size(
    config: Config, write_tokens: WriteTokens, size: int, micro: int, dp_size: int
) -> None:
    config.data.source, config.data.path = "tokens", str(write_tokens("a", [list(range(1000))] * 2))
    config.train.global_batch_size, config.train.micro_batch_size, config.train.eval_batches = size * dp_size, micro, 99
    source = open_data(config, prepare(config)).validation
    assert source is not None
    assert source.without_repeats() == 12
    shares = [list(validation_batches(source, config, CPU, DataShare(r, dp_size))) for r in range(dp_size)]
    assert len({len(share) for share in shares}) == 1, "every rank takes part in every batch"
    labels = [batch.labels[batch.loss_mask] for share in shares for microbatches in share for batch in microbatches]
    assert sorted(torch.cat(labels).tolist()) == list(range(801, 801 + 12 * 16))


def test_a_failure_while_reading_ahead_surfaces_at_its_step(config: Config, write_tokens: WriteTokens) -> None:
    config.data.source, config.data.path = "tokens", str(write_tokens("a", [[1] * 2000]))
    config.train.eval_interval = 0
    data = open_data(config, prepare(config))
    broken = replace(data.train, vocab_size=1)
    with train_batches(broken, config, steps_of(config), CPU) as batches:
        for _ in range(2):
            refused = next(batches)
            assert "outside the vocabulary of 1" in str(UserError(refused.problems))
            assert refused.local_tokens == sum(int(batch.loss_mask.sum()) for batch in refused.microbatches) == 0


@pytest.mark.parametrize("device", [CPU, torch.device("meta")], ids=str)  # one that copies
@pytest.mark.parametrize("cross_document_attention", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_what_stands_in_for_unreadable_batches_has_their_number_and_form_and_no_loss(
    data: OpenedData, config: Config, size: int, cross_document_attention: bool, device: torch.device
) -> None:
    config.data.cross_document_attention = cross_document_attention
    real = [batch.to(device) for batch in stream(data, config, 1, size=size)]
    broken, problems, whole = replace(data.train, vocab_size=1), list[Problem](), config.train.global_batch_size
    masked = local_batches(broken, config, range(whole), DataShare(0, size), problems)
    masked = [batch.to(device) for batch in masked]
    assert len(problems) == 1, "the reason is not repeated for every microbatch"
    assert len(masked) == len(real)
    for expected, found in zip(real, masked, strict=True):
        assert device != CPU or not found.loss_mask.any()
        assert (len(found.positions) == 1) == cross_document_attention, "one row for all"
        for field in fields(Batch):
            value, meant = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(meant, torch.Tensor):
                assert (value.shape, value.dtype, value.stride()) == (meant.shape, meant.dtype, meant.stride())
            else:
                assert type(value) is type(meant)


@pytest.mark.gpu
def test_batches_arrive_on_the_device_from_pinned_memory(data: OpenedData, config: Config) -> None:
    cuda = torch.device("cuda", 0)
    expected = stream(data, config, 3)
    with train_batches(data.train, config, steps_of(config), cuda) as batches:
        arrived = [batch for _ in range(3) for batch in next(batches).microbatches]
    assert all(batch.tokens.device == cuda for batch in arrived)
    assert all(len(batch.positions) == 1 for batch in arrived)
    assert content(arrived) == content(expected)
