"""A microbatch that is repeated by a graph gives what it gives launch by launch."""

from collections.abc import Callable
from threading import Thread

import pytest
import torch
from torch import Tensor

from megalite.config.schema import Config, ParallelConfig, TrainConfig
from megalite.data.batch import Batch
from megalite.launch.context import CPU, ParallelContext
from megalite.pipeline import executor
from megalite.pipeline.executor import FIRST, MicrobatchGraph, captured
from megalite.train.build import Training
from tests.model.small import random_batch, small
from tests.pipeline.stages import started


def training_of(cuda_graph: bool, device: torch.device) -> Training:
    train = TrainConfig(compile=device.type == "cuda", cuda_graph=cuda_graph, seq_length=32)
    config = Config(model=small(head_size=16), train=train, parallel=ParallelConfig(schedule="1f1b"))
    return started(ParallelContext(device=device, dtype=torch.float32), config)


def trained(training: Training, batches: list[Batch], device: torch.device) -> list[Tensor]:
    """Losses and gradients of two steps, whose losses are divided by other numbers."""
    found: list[Tensor] = []
    for scale in (0.02, 0.01):
        training.buffers.start_step()
        found.append(training.executor.forward_backward(batches, torch.tensor(scale, device=device)).clone())
        training.sync.finish()
        found += [each.clone() for each in training.buffers.gradient_buckets]
    return found


def differing_batches(device: torch.device) -> list[Batch]:
    """More than are computed before the capture."""
    return [random_batch(small(), s=32, seed=seed).to(device) for seed in range(FIRST + 2)]


def test_a_capture_that_is_repeated_gives_losses_and_gradients_of_each_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the place of a graph: what was captured is computed anew from the same tensors, wherever it is repeated."""
    bodies: list[Callable[[], Tensor]] = []

    def noted(body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        bodies.append(body)
        loss = torch.zeros(())

        def repeat() -> None:
            loss.copy_(body())

        return loss, repeat

    wanted = trained(training_of(False, CPU), differing_batches(CPU), CPU)
    monkeypatch.setattr(executor, "captured", noted)
    training = training_of(False, CPU)
    training.executor._graph = MicrobatchGraph(training.chunks[0])
    found = trained(training, differing_batches(CPU), CPU)
    assert len(bodies) == 1, "one capture serves all steps"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    first, second, *_ = [training.executor._graph(batch, torch.ones(())) for batch in differing_batches(CPU)]
    assert not torch.equal(first, second), "a loss outlives the next microbatch"


def test_a_capture_that_fails_ends_the_run_with_the_setting_that_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 leaves its allocator in the capture (pytorch#180395): whoever went on would fail later."""

    def fails(body: Callable[[], Tensor]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(executor, "captured", fails)
    training = training_of(False, CPU)
    training.executor._graph = MicrobatchGraph(training.chunks[0])
    with pytest.raises(RuntimeError, match=r"train\.cuda_graph=false") as raised:
        trained(training, differing_batches(CPU), CPU)
    assert "capturing" in str(raised.value.__cause__)
    assert not hasattr(training.executor._graph, "_loss")


@pytest.mark.gpu
def test_a_capture_stands_another_thread_that_pins_memory() -> None:
    """As the reader of batches does, whenever it wants."""
    x = torch.ones(8, device="cuda")

    def body() -> Tensor:
        thread = Thread(target=lambda: torch.empty(1 << 22).pin_memory())
        thread.start()
        thread.join()
        return x * 2

    found, repeat = captured(body)
    repeat()
    assert found.tolist() == [2.0] * 8


@pytest.mark.gpu
def test_a_cuda_graph_gives_losses_and_gradients_of_each_microbatch() -> None:
    device = torch.device("cuda", 0)
    wanted, found = (trained(training_of(on, device), differing_batches(device), device) for on in (False, True))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # products may choose other kernels in a capture
