"""Norms and rotations against torch's own functions and the textbook formulas."""

from math import pi

import pytest
import torch
import torch.nn.functional as F

from megalite.model.norm import RMSNorm, build_norm
from megalite.model.rotary import rotary_frequencies, rotary_tables, rotate
from megalite.tensor_parallel.layers import TpContext
from tests.model.small import CPU, small

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)],
)
def test_rms_norm_is_torchs_with_its_gradients(dtype: torch.dtype, tolerance: float, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 40, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    norm = RMSNorm(40, 1e-2, TpContext(dtype, torch.device(device)))
    norm.weight.data.copy_(torch.randn(40, generator=generator))
    grad = torch.randn(5, 3, 40, dtype=torch.float64, generator=generator).to(dtype)
    x64, weight64 = x.detach().double().requires_grad_(), norm.weight.detach().cpu().double().requires_grad_()
    expected = F.rms_norm(x64, (40,), weight64, 1e-2)
    exact = [expected, *torch.autograd.grad(expected, (x64, weight64), grad.double())]
    there = x.detach().to(device).requires_grad_()
    ours = norm(there)
    for value, true in zip(
        [ours, *torch.autograd.grad(ours, (there, norm.weight), grad.to(device))], exact, strict=True
    ):
        assert value.dtype == dtype
        assert (value.cpu() - true).abs().max() <= tolerance * true.abs().max()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_fp16_is_normed_where_its_squares_would_overflow(kind: str) -> None:
    config = small(norm=kind, bias=False)
    norm = build_norm(config, TpContext(torch.float16, CPU))
    norm.weight.data.fill_(1.0)
    x = 3000 * torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(0))  # fp16 ends at 65504
    small_x = (x / 3000).half()
    torch.testing.assert_close(norm(x.half()), norm(small_x), rtol=0.01, atol=2e-3)


@DEVICES
@pytest.mark.parametrize("positions", [[[0, 1, 2, 3]], [[0, 1, 2, 3], [9, 3, 0, 1]]], ids=["of all", "of each"])
def test_rotation_turns_pairs_by_position_times_frequency(positions: list[list[int]], device: str) -> None:
    config = small(head_size=6)
    frequencies = rotary_frequencies(config)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3)]).double())
    x = torch.randn(4, 2, 3, 5, 6, dtype=torch.float64)
    tables = rotary_tables(frequencies, torch.tensor(positions))
    turned = rotate(*(part.to(device) for part in (x, *tables))).cpu()
    angles = torch.tensor(positions).t()[:, :, None, None, None] * frequencies
    pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(turned, expected)


@DEVICES
def test_the_gradient_of_a_rotation_is_the_turn_back_times_its_magnitude(device: str) -> None:
    tables = rotary_tables(rotary_frequencies(small(head_size=4)), torch.tensor([[3, 8]]), magnitude=1.3)
    tables = tuple(table.to(device) for table in tables)
    x = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, *tables), x)


def test_llama3_scaling_keeps_high_divides_low_and_blends_between() -> None:
    scaling = {"rope_scaling_factor": 8.0, "rope_original_positions": 1000}
    config = small(head_size=64, rope_low_frequency_factor=1.0, rope_high_frequency_factor=4.0, **scaling)
    plain, scaled = rotary_frequencies(small(head_size=64)), rotary_frequencies(config)
    turns = 1000 * plain / (2 * pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled > plain / 8) & (scaled < plain))[between].all()
