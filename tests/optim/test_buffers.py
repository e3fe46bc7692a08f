"""The flat buffers: one layout for parameters and gradients, no gradient lost, none counted twice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megalite.optim.buffers import ALIGNMENT, TrainingBuffers, buffer_layout
from megalite.parallel.parameters import ParameterRecord

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
        buffers.finish_step()
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
