"""The flat buffers: one layout for parameters and gradients, no gradient lost, none counted twice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megalite.optim.buffers import ALIGNMENT, TrainingBuffers, buffer_layout
from megalite.parallel.parameters import ParameterRecord, Split

shapes = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=20
)


@given(shapes)
def test_slots_are_aligned_disjoint_and_split_by_decay(parts: list[tuple[list[int], bool]]) -> None:
    records = [ParameterRecord(f"p{i}", tuple(shape), "normal", 0.1, decay) for i, (shape, decay) in enumerate(parts)]
    layout = buffer_layout(records)
    assert {slot.record for slot in layout.slots} == set(records)
    cursor = 0
    for slot in layout.slots:
        assert slot.start % ALIGNMENT == 0
        assert slot.start >= cursor
        assert (slot.stop <= layout.decay_stop) == slot.record.decay
        cursor = slot.stop
    assert cursor <= layout.size


class TwoLayers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.second = nn.Linear(7, 3, dtype=dtype)
        self.unused = nn.Linear(3, 3, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def attached(dtype: torch.dtype) -> tuple[TwoLayers, TrainingBuffers]:
    torch.manual_seed(0)
    model = TwoLayers(dtype)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    records = [
        ParameterRecord(name, tuple(value.shape), "normal", 0.1, value.ndim > 1) for name, value in start.items()
    ]
    buffers = TrainingBuffers(buffer_layout(records), dtype=dtype, device=torch.device("cpu"))
    buffers.attach(model)
    buffers.fill(start.items())
    return model, buffers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_all_microbatches_add_up_and_start_anew_each_step(dtype: torch.dtype) -> None:
    model, buffers = attached(dtype)
    inputs = [torch.randn(4, 5, dtype=dtype) for _ in range(3)]
    expected: dict[str, torch.Tensor] = {}
    for x in inputs:
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(model(x).sum(), parameters, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            term = torch.zeros(1) if gradient is None else gradient
            expected[name] = expected.get(name, 0) + term.to(buffers.gradients.dtype)
    for _ in range(2):  # the second step must not see the first one's gradients
        buffers.start_step()
        for x in inputs:
            model(x).sum().backward()
    for slot in buffers.layout.slots:
        torch.testing.assert_close(
            slot.view(buffers.gradients), expected[slot.record.name].expand(slot.record.shape), rtol=1e-12, atol=0
        )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_are_views_of_the_flat_buffer_and_fp32_has_no_second_copy() -> None:
    model, buffers = attached(torch.float32)
    assert buffers.parameters is buffers.masters
    buffers.masters.fill_(3.0)
    assert all((parameter == 3.0).all() for parameter in model.parameters())


def test_bf16_parameters_are_the_rounded_masters() -> None:
    model, buffers = attached(torch.bfloat16)
    assert buffers.masters.dtype == torch.float32
    buffers.masters.copy_(torch.linspace(0, 1, buffers.layout.size))
    buffers.round_masters()
    weight = dict(model.named_parameters())["first.weight"]
    slot = next(slot for slot in buffers.layout.slots if slot.record.name == "first.weight")
    assert torch.equal(weight, slot.view(buffers.masters).bfloat16())


SHARDED = [
    ParameterRecord("table", (8, 6), "normal", 0.1, True, split=Split(0)),
    ParameterRecord("position", (5, 6), "normal", 0.1, True),
    ParameterRecord("qkv", (1, 4 + 2, 3, 6), "normal", 0.1, True, split=Split(0, shared_tail=2)),
    ParameterRecord("bias", (8,), "zeros", 0.0, False, split=Split(0)),
    ParameterRecord("norm", (6,), "ones", 0.0, False),
]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_together_count_each_element_once(size: int) -> None:
    total = 0.0
    for index in range(size):
        layout = buffer_layout(SHARDED, size=size, index=index)
        buffer = torch.zeros(layout.size, dtype=torch.float64)
        for slot in layout.slots:
            slot.view(buffer).fill_(1.0)
        total += sum(float(part.sum()) for part in layout.counted(buffer))
    assert total == sum(record.numel for record in SHARDED)


def test_what_one_rank_counts_is_few_ranges() -> None:
    layout = buffer_layout(SHARDED)
    assert len(layout.counted(torch.zeros(layout.size))) == 1
    other = buffer_layout([record for record in SHARDED if record.name != "qkv"], size=2, index=1)
    assert len(other.counted(torch.zeros(other.size))) == 2  # decayed and not


def test_ranks_hold_the_replicated_parameters_in_the_same_ranges() -> None:
    layouts = [buffer_layout(SHARDED, size=2, index=index) for index in range(2)]
    for layout in layouts:
        buffer = torch.zeros(layout.size)
        for slot in layout.slots:
            slot.view(buffer).fill_(float(slot.record.split is None))
        assert [float(part.sum()) for part in layout.replicated(buffer)] == [30.0, 6.0]


def test_a_logical_tensor_fills_this_rank_s_shard() -> None:
    value = torch.arange(6 * 3 * 6, dtype=torch.float64).view(1, 6, 3, 6)
    layout = buffer_layout([SHARDED[2]], size=4, index=2)
    buffers = TrainingBuffers(layout, dtype=torch.float64, device=torch.device("cpu"))
    buffers.fill([("qkv", value)])
    assert torch.equal(layout.slots[0].view(buffers.masters), value[:, [2, 4, 5]])
