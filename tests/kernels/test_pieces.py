"""Work by pieces is the work at once, whatever the pieces: also where the last one is shorter, or one row is one."""

import pytest
import torch

from megalite.kernels import pieces as module
from megalite.kernels.pieces import piece_buffers, pieces
from megalite.kernels.products import add_transposed_product
from megalite.kernels.rotate import rotate
from megalite.model.norm import RMSNorm
from megalite.model.rotary import rotary_tables
from megalite.tensor_parallel.layers import TpContext
from tests.model.test_loss import peak_bytes

CPU = torch.device("cpu")
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)


@pytest.fixture(params=[1, 45, 10**6], ids=["a-row", "some-rows", "whole"])
def elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Per piece, whatever the number of threads."""
    monkeypatch.setattr(module, "ELEMENTS", request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert isinstance(request.param, int)
    return request.param


def test_pieces_cover_all_rows_once_and_side_by_side(elements: int) -> None:
    long, short = torch.arange(11 * 6).view(11, 2, 3), torch.arange(11)
    parts = list(pieces(long, short))
    assert {len(part) for part, _ in parts[:-1]} <= {min(11, max(1, elements // 6))}
    buffers = piece_buffers(2, long, torch.float64)
    assert buffers.shape == (2, max(len(part) for part, _ in parts), 2, 3)
    assert all(len(part) == len(of_short) for part, of_short in parts)
    assert torch.equal(torch.cat([part for part, _ in parts]), long)
    assert torch.equal(torch.cat([part for _, part in parts]), short)


def test_norms_by_pieces_are_norms(elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(9, 1e-3, TpContext(torch.float64, CPU))
    norm.weight.data.copy_(torch.randn(9, generator=generator))
    x = torch.randn(13, 9, dtype=torch.float64, generator=generator).requires_grad_()
    expected = torch.nn.functional.rms_norm(x, (9,), norm.weight, 1e-3)
    grad = torch.randn(13, 9, dtype=torch.float64, generator=generator)
    found = norm(x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    of_both = (torch.autograd.grad(out, (x, norm.weight), grad) for out in (found, expected))
    torch.testing.assert_close(*of_both, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_are_rounded_once(elements: int, dtype: torch.dtype) -> None:
    """Outputs and gradients to x are those of fp64, rounded, but for fp32's own rounding."""
    generator = torch.Generator().manual_seed(0)
    norm, wide = RMSNorm(48, 1e-3, TpContext(dtype, CPU)), RMSNorm(48, 1e-3, TpContext(torch.float64, CPU))
    norm.weight.data.copy_(torch.randn(48, generator=generator))
    wide.weight.data.copy_(norm.weight.data)
    x = torch.randn(13, 48, generator=generator).to(dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    grad = torch.randn(13, 48, generator=generator).to(dtype)
    found, expected = norm(x), wide(x64)
    of_both = [torch.autograd.grad(out, of, grad.to(out.dtype))[0] for out, of in ((found, x), (expected, x64))]
    for one, other in ((found, expected), of_both):
        assert ((one - other.to(dtype)) == 0).double().mean() > 0.99


def test_norms_keep_no_wide_copy_of_what_they_norm(elements: int) -> None:
    norm = RMSNorm(64, 1e-3, TpContext(torch.bfloat16, CPU))
    x = torch.ones(4096, 64, dtype=torch.bfloat16)
    wide = min(4096, max(1, elements // 64)) * 64 * 4
    with torch.no_grad():
        assert peak_bytes(lambda: norm(x)) <= x.nbytes + 4096 * 4 + wide + 4096


def test_norms_of_nothing_are_nothing(elements: int) -> None:
    norm, x = (
        RMSNorm(9, 1e-3, TpContext(torch.bfloat16, CPU)),
        torch.empty(0, 9, dtype=torch.bfloat16, requires_grad=True),
    )
    grad_x, grad_weight = torch.autograd.grad(norm(x).sum(), (x, norm.weight))
    assert grad_x.shape == (0, 9)
    assert torch.equal(grad_weight, torch.zeros_like(norm.weight))


@pytest.mark.parametrize("expanded", [True, False])
def test_heads_are_rotated_by_pieces_and_turned_back(elements: int, expanded: bool) -> None:
    """One row of positions for all samples, or each with its own."""
    x = torch.randn(5, 2, 3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    positions = torch.arange(5)[None] if expanded else torch.tensor([[0, 1, 2, 3, 4], [7, 0, 1, 0, 9]])
    tables = rotary_tables(FREQUENCIES, positions)
    assert len(tables[0]) == (1 if expanded else 2)
    found = rotate(x, *tables)
    angles = (positions[:, :, None] * FREQUENCIES).transpose(0, 1)[:, :, None, None]  # [s, b, 1, 1, d / 2]
    turned = torch.complex(*x.detach().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), dim=-1), rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(found, x, found)[0], x, rtol=0, atol=1e-14)


def test_products_are_added_by_pieces_in_fp32(elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(17, n, generator=generator).bfloat16() for n in (23, 9))
    total = torch.ones(23, 9)
    add_transposed_product(total, left, right)
    assert torch.equal(total, 1.0 + torch.mm(left.t(), right).float())
