"""A microbatch that is repeated by a graph gives what it gives launch by launch, and is a graph where that pays."""

from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config.schema import Config, DataConfig, MoEConfig, ParallelConfig, TrainConfig
from megalite.data.batch import Batch
from megalite.kernels import grouped
from megalite.launch.context import CPU, ParallelContext
from megalite.model import attention
from megalite.pipeline import executor
from megalite.pipeline.executor import FIRST, MEASURED, MicrobatchGraph, captured, timed
from megalite.train.build import Training
from tests.kernels import plain_expert_rows
from tests.model.small import ALL_DROPOUTS, random_batch, small
from tests.pipeline.stages import started

MOE = MoEConfig(num_experts=4, ffn_hidden_size=16, aux_loss_coeff=0.01, score="sigmoid", capacity_factor=1.0)
MODELS = {  # and the bound on a GPU, where products may choose other kernels in a capture
    "plain": (small(head_size=16), 1e-5),
    "blend": (small(head_size=16), 1e-5),
    "documents": (small(head_size=16, dropout=0.2, embedding_dropout=0.1), 1e-5),
    "dropout": (small(head_size=16, **ALL_DROPOUTS), 1e-5),
    "experts": (small(head_size=16, dropout=0.2, moe=MOE), 2e-2),
}


class Recorder(TorchDispatchMode):
    """A capture on a CPU: notes each operation with its tensors and numbers, and repeats it on the same tensors. Like
    CUDA it refuses what asks a tensor for its values."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = operation(*args, **(kwargs or {}))
        self._operations.append((operation, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def repeat(self) -> None:
        for operation, args, kwargs, out in self._operations:
            for old, new in zip(tree_leaves(out), tree_leaves(operation(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else it is a part of its input
                    old.copy_(new)


def recorder_of(training: Training) -> Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]:
    """In the place of `captured`."""
    state = [*training.buffers.gradient_buckets, training.chunks[0].router_metrics, training.chunks[0].source_sums]

    def refuse(tensor: Tensor) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def recorded(body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        before = [tensor.clone() for tensor in state]
        with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
            patch.setattr(Tensor, "tolist", refuse)  # it does not pass by the recorder
            loss = body()
        for tensor, values in zip(state, before, strict=True):  # a capture computes nothing
            tensor.copy_(values)
        return loss, recorder.repeat

    return recorded


def training_of(name: str, cuda_graph: bool, device: torch.device, dtype: torch.dtype = torch.float64) -> Training:
    model, train = MODELS[name][0], TrainConfig(compile=device.type == "cuda", cuda_graph=cuda_graph, seq_length=32)
    data = DataConfig(path=["web", "code"] if name == "blend" else None)
    config = Config(model=model, train=train, data=data, parallel=ParallelConfig(schedule="1f1b"))
    return started(ParallelContext(device=device, dtype=dtype), config)


def trained(training: Training, batches: list[Batch]) -> list[Tensor]:
    """Losses, gradients, what is counted of routers and sources in two steps, whose losses have other divisors."""
    found: list[Tensor] = []
    for scale in (0.02, 0.01):
        training.buffers.start_step()
        scales = torch.full((), scale, dtype=training.buffers.master_dtype, device=training.buffers.device)
        found.append(training.executor.forward_backward(batches, scales).clone())
        training.sync.finish()
        [model] = training.chunks
        counted = model.router_metrics, model.source_sums
        found += [each.clone() for each in (*training.buffers.gradient_buckets, *counted)]
    return found


def differing_batches(name: str, device: torch.device) -> list[Batch]:
    """More than decide on a graph."""
    found = []
    for seed in range(FIRST + MEASURED + 1):
        batch = random_batch(small(), s=32, seed=seed, first_sample=3 * seed)
        if name in ("documents", "dropout"):
            starts = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.1
            batch = replace(batch, documents=starts.cumsum(1).int())
        if name == "blend":
            batch = replace(batch, sources=torch.arange(seed, seed + len(batch.tokens)) // 2 % 2)
        found.append(batch.to(device))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_capture_that_is_repeated_gives_losses_and_gradients_of_each_microbatch(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(attention, "MAX_ROWS", 0)  # by rows, the host would look at documents
    monkeypatch.setattr(grouped, "_has_kernel", lambda device: True)
    plain_expert_rows.stand_in(monkeypatch)
    dtype, captures = torch.bfloat16 if name == "experts" else torch.float64, []
    wanted = trained(training_of(name, False, CPU, dtype), differing_batches(name, CPU))
    training = training_of(name, True, CPU, dtype)
    recorded = recorder_of(training)
    monkeypatch.setattr(executor, "captured", lambda body: captures.append(body) or recorded(body))
    found = trained(training, differing_batches(name, CPU))
    assert len(captures) == 1, "one capture serves all steps"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert (training.chunks[0].source_sums > 0).tolist() == [[True] * 2] * (2 if name == "blend" else 0)
    graph, one = training.executor._graph, torch.ones((), dtype=training.buffers.master_dtype)
    assert graph is not None
    first, second, *_ = [graph(batch, one) for batch in differing_batches(name, CPU)]
    assert not torch.equal(first, second), "a loss outlives the next microbatch"


@pytest.mark.parametrize("decision", ["tolist", "item"])
def test_what_the_host_decides_is_no_part_of_a_capture(monkeypatch: pytest.MonkeyPatch, decision: str) -> None:
    """Else the test above would show nothing."""
    training = training_of("documents", True, CPU)
    monkeypatch.setattr(executor, "captured", recorder_of(training))
    if decision == "item":
        monkeypatch.setattr(attention, "MAX_ROWS", 0)
        mask = attention.dense_mask
        monkeypatch.setattr(attention, "dense_mask", lambda numbers, dtype: mask(numbers + int(numbers[0, 0]), dtype))
    with pytest.raises(RuntimeError, match=r"train\.cuda_graph=false"):
        trained(training, differing_batches("documents", CPU))


def test_a_capture_that_fails_ends_the_run_with_the_setting_that_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 leaves its allocator in the capture (pytorch#180395): whoever went on would fail later."""

    def fails(body: Callable[[], Tensor]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(executor, "captured", fails)
    training = training_of("plain", True, CPU)
    with pytest.raises(RuntimeError, match=r"train\.cuda_graph=false") as raised:
        trained(training, differing_batches("plain", CPU))
    assert "capturing" in str(raised.value.__cause__)
    assert not hasattr(training.executor._graph, "_loss")


@pytest.mark.parametrize(
    ("seconds", "taken", "words"),
    [
        ([(0.020, 0.021), (0.019, 0.020)], True, "one call starts each microbatch from now on, as a microbatch takes"),
        ([(0.020, 0.079), (0.020, 0.079)], True, "takes 79.0 ms, and the host 20.0 ms to start it"),
        ([(0.020, 0.081), (0.020, 0.081)], False, "kernels are started one by one, as a microbatch takes 81.0 ms"),
        ([(0.900, 0.950), (0.020, 0.100)], False, "takes 100.0 ms, and the host 20.0 ms"),  # the first was held up
        ([(0.020, 0.060), (0.025, 0.900)], True, "takes 60.0 ms, and the host 20.0 ms"),
    ],
)
def test_a_graph_is_taken_where_the_host_is_not_much_faster_than_the_device(
    monkeypatch: pytest.MonkeyPatch, seconds: list[tuple[float, float]], taken: bool, words: str
) -> None:
    """Nothing is lost of the microbatches that are timed."""

    def in_no_time(forward: Callable[[], Tensor]) -> tuple[Tensor, tuple[float, float]]:
        loss = forward()
        loss.backward()
        return loss.detach(), coming.pop(0)

    wanted = trained(training_of("plain", False, CPU), differing_batches("plain", CPU))
    training, coming, captures, said = training_of("plain", False, CPU), [*seconds], [], list[str]()
    recorded = recorder_of(training)
    monkeypatch.setattr(executor, "captured", lambda body: captures.append(body) or recorded(body))
    monkeypatch.setattr(executor, "timed", in_no_time)
    training.executor._graph = MicrobatchGraph(training.chunks[0], None, said.append)
    found = trained(training, differing_batches("plain", CPU))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert (len(captures), coming) == (taken, [])
    assert len(said) == 1
    assert said[0].startswith("train.cuda_graph=null: ")
    assert words in said[0]


def test_no_time_of_a_profiled_step_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler slows the host, which would look as if a graph paid."""
    timed_when = list[bool]()

    def in_no_time(forward: Callable[[], Tensor]) -> tuple[Tensor, tuple[float, float]]:
        timed_when.append(training.executor.profiled)
        loss = forward()
        loss.backward()
        return loss.detach(), (0.001, 1.0)

    batches = differing_batches("plain", CPU)
    wanted = trained(training_of("plain", False, CPU), batches)
    training = training_of("plain", False, CPU)
    monkeypatch.setattr(executor, "timed", in_no_time)
    training.executor._graph = graph = MicrobatchGraph(training.chunks[0], None, lambda line: None)
    training.executor.profiled = True
    found = trained(training, batches)
    assert (timed_when, graph.wanted) == ([], None)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    training.executor.profiled = False
    trained(training, batches)
    assert (timed_when, graph.wanted) == ([False] * MEASURED, False)


@pytest.mark.gpu
def test_times_are_of_the_host_and_of_the_device() -> None:
    x = torch.ones((), device="cuda", requires_grad=True)

    def forward(device_cycles: int, host_s: float) -> Tensor:
        torch.cuda._sleep(device_cycles)
        sleep(host_s)
        return x * 2

    timed(lambda: forward(1, 0.0))
    _, (host, device) = timed(lambda: forward(100_000_000, 0.0))
    assert host < 0.01 < device, "a device that works for 50 ms or more"
    _, (host, device) = timed(lambda: forward(1, 0.02))
    assert 0.02 < host < device < 0.04, "a device that waits for the host"


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
@pytest.mark.parametrize("name", MODELS)
def test_a_cuda_graph_gives_losses_and_gradients_of_each_microbatch(name: str) -> None:
    device, dtype = torch.device("cuda", 0), torch.bfloat16 if name == "experts" else torch.float32
    if name == "experts" and not grouped._has_kernel(device):
        pytest.skip("this GPU multiplies experts one by one")
    batches = differing_batches(name, device)
    wanted, found = (trained(training_of(name, on, device, dtype), batches) for on in (False, True))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=MODELS[name][1], atol=MODELS[name][1] / 10)
