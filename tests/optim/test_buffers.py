"""The buffers: one layout for parameters and gradients, no gradient lost, none counted twice."""

import pytest
import torch
from torch import Tensor, nn

from megalite.layout.buffer_layout import BufferLayout, buffer_layout
from megalite.layout.parameters import ParameterRecord, Split
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.gradients import owned_for_norm
from megalite.optim.zero import ReplicaGroups

CPU = torch.device("cpu")


class TwoLayers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20, dtype=dtype)
        self.second = nn.Linear(20, 11, dtype=dtype)
        self.unused = nn.Linear(11, 11, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def attached(
    dtype: torch.dtype, *, shards: int = 1, index: int = 0, gradient_dtype: torch.dtype | None = None
) -> tuple[TwoLayers, TrainingBuffers]:
    torch.manual_seed(0)
    model = TwoLayers(dtype)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    records = [
        ParameterRecord(name, tuple(value.shape), "normal", 0.1, value.ndim > 1) for name, value in start.items()
    ]
    layout = buffer_layout(records, dense_shards=shards, bucket_size=300)
    buffers = TrainingBuffers(layout, dtype=dtype, device=CPU, dense=index, gradient_dtype=gradient_dtype)
    buffers.attach(model)
    buffers.fill(start.items())
    return model, buffers


def gradients_by_name(buffers: TrainingBuffers) -> dict[str, Tensor]:
    return {name: buffers.gradient(name) for name in buffers.places}


@pytest.mark.parametrize(
    ("dtype", "summed_in"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_gradients_of_all_microbatches_add_up_and_start_anew_each_step(
    dtype: torch.dtype, summed_in: torch.dtype
) -> None:
    model, buffers = attached(dtype, gradient_dtype=summed_in)
    inputs = [torch.randn(4, 12, dtype=dtype) for _ in range(3)]
    expected: dict[str, Tensor] = {}
    for x in inputs:
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(model(x).sum(), parameters, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            term = torch.zeros(1) if gradient is None else gradient
            expected[name] = expected.get(name, 0) + term.to(summed_in)
    for _ in range(2):  # the second step must not see the first one's gradients
        buffers.start_step()
        for x in inputs:
            model(x).sum().backward()
    for name, found in gradients_by_name(buffers).items():
        assert found.dtype == summed_in
        torch.testing.assert_close(found, expected[name].expand(found.shape), rtol=1e-12, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_the_rounded_masters_of_this_rank_s_slices(dtype: torch.dtype) -> None:
    _, buffers = attached(dtype, shards=2, index=1)
    assert {master.dtype for master in buffers.masters} == {torch.float32}
    assert len({master.untyped_storage().data_ptr() for master in buffers.masters}) == 1
    before = [bucket.clone() for bucket in buffers.parameter_buckets]
    for master in buffers.masters:
        master.copy_(torch.linspace(0, 1, len(master)))
    buffers.round_masters()
    for now, then, master in zip(buffers.parameter_buckets, before, buffers.masters, strict=True):
        half = len(master)
        assert torch.equal(now[half:], master.to(dtype))
        assert torch.equal(now[:half], then[:half])


def test_start_values_reach_parameters_and_masters_alike() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for index in range(3):
            model, buffers = attached(dtype, shards=3, index=index)
            torch.manual_seed(0)
            expected = dict(TwoLayers(dtype).named_parameters())
            assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
            held = [bucket.clone() for bucket in buffers.parameter_buckets]
            buffers.round_masters()
            assert all(map(torch.equal, buffers.parameter_buckets, held))


SHARDED = [
    ParameterRecord("table", (9, 6), "normal", 0.1, True, split=Split(0, uneven=True)),
    ParameterRecord("position", (5, 6), "normal", 0.1, True),
    ParameterRecord("qkv", (1, 4 + 2, 3, 6), "normal", 0.1, True, split=Split(0, replicated=2)),
    ParameterRecord("bias", (8,), "zeros", 0.0, False, split=Split(0)),
    ParameterRecord("norm", (6,), "ones", 0.0, False),
]


def with_ones_in_gradients(layout: BufferLayout, index: int) -> TrainingBuffers:
    buffers = TrainingBuffers(layout, dtype=torch.float64, device=CPU, dense=index)
    for each in buffers.owned:
        buffers.gradients[each.bucket][each.in_slice.start : each.in_slice.stop] = 1.0
    return buffers


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("repeats", [1, 2])
def test_ranks_together_count_each_element_once(tp: int, shards: int, repeats: int) -> None:
    total = 0.0
    for index in range(tp):
        layout = buffer_layout(SHARDED, tp=(tp, index), dense_shards=shards, bucket_size=64)
        for shard in range(shards):
            for repeat in range(repeats):
                replicas = ReplicaGroups(replica=repeat)
                groups = {"dense": replicas, "expert": ReplicaGroups()}
                parts = owned_for_norm(with_ones_in_gradients(layout, shard), groups)
                total += sum(float(part.sum()) for part in parts)
    assert total == sum(record.numel for record in SHARDED)


def test_a_logical_tensor_fills_this_rank_s_shard() -> None:
    value = torch.arange(6 * 3 * 6, dtype=torch.float64).view(1, 6, 3, 6)
    buffers = TrainingBuffers(buffer_layout([SHARDED[2]], tp=(4, 2)), dtype=torch.float64, device=CPU)
    buffers.fill([("qkv", value)])
    assert torch.equal(buffers.parameter("qkv"), value[:, [2, 4, 5]])
