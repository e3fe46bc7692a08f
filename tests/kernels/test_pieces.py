"""Work by pieces is the work at once, whatever the pieces: also where the last one is shorter, or one row is one."""

import pytest
import torch
from torch import Tensor

from megalite.kernels import pieces as module
from megalite.kernels.causal_attention import BLOCK, causal_attention
from megalite.kernels.pieces import piece_buffers, pieces
from megalite.kernels.products import add_transposed_product
from megalite.kernels.rotate import rotate, rotate_heads_
from megalite.kernels.swiglu import swiglu
from megalite.model.norm import RMSNorm
from megalite.model.rotary import rotary_tables
from megalite.tensor_parallel.layers import Placement
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
    norm = RMSNorm(9, 1e-3, Placement(torch.float64, CPU))
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
    norm, wide = RMSNorm(48, 1e-3, Placement(dtype, CPU)), RMSNorm(48, 1e-3, Placement(torch.float64, CPU))
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
    norm = RMSNorm(64, 1e-3, Placement(torch.bfloat16, CPU))
    x = torch.ones(4096, 64, dtype=torch.bfloat16)
    wide = min(4096, max(1, elements // 64)) * 64 * 4
    with torch.no_grad():
        assert peak_bytes(lambda: norm(x)) <= x.nbytes + 4096 * 4 + wide + 4096


def test_norms_of_nothing_are_nothing(elements: int) -> None:
    norm, x = (
        RMSNorm(9, 1e-3, Placement(torch.bfloat16, CPU)),
        torch.empty(0, 9, dtype=torch.bfloat16, requires_grad=True),
    )
    grad_x, grad_weight = torch.autograd.grad(norm(x).sum(), (x, norm.weight))
    assert grad_x.shape == (0, 9)
    assert torch.equal(grad_weight, torch.zeros_like(norm.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swiglu_has_the_bits_of_its_two_steps(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 2, 24, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(7, 2, 12, generator=generator).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    found, expected = swiglu(x), torch.nn.functional.silu(gate) * up
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (found, expected)))


@pytest.mark.parametrize("expanded", [True, False])
def test_heads_are_rotated_in_place_as_in_the_projection_and_turned_back(elements: int, expanded: bool) -> None:
    """One row of positions for all samples, or each with its own."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 2, 3, 4, 6, dtype=torch.float64, generator=generator)  # 3 groups of 2 queries
    positions = torch.arange(5).expand(2, -1) if expanded else torch.tensor([[0, 1, 2, 3, 4], [7, 0, 1, 0, 9]])
    tables = rotary_tables(FREQUENCIES, positions)
    assert len(tables[0]) == (1 if expanded else 2)
    rotated = rotate(qkv, *tables)
    for_one_sample_each = [rotate(qkv[:, b : b + 1], *rotary_tables(FREQUENCIES, positions[b : b + 1])) for b in (0, 1)]
    torch.testing.assert_close(rotated, torch.cat(for_one_sample_each, 1), rtol=0, atol=0)
    heads = qkv[..., :3, :].flatten(2, 3).permute(1, 2, 0, 3).contiguous()  # [b, heads, s, d]
    before = heads.clone()
    rotate_heads_(heads, *tables)
    expected = rotated[..., :3, :].flatten(2, 3).permute(1, 2, 0, 3)
    torch.testing.assert_close(heads, expected, rtol=0, atol=1e-15)
    rotate_heads_(heads, *tables, sign=-1)
    torch.testing.assert_close(heads, before, rtol=0, atol=1e-14)


def _rotated(qkv: Tensor, *tables: Tensor) -> Tensor:
    """The fused projection with its queries and its keys turned."""
    return torch.cat((rotate(qkv[..., :-1, :], *tables), qkv[..., -1:, :]), dim=-2)


@pytest.mark.parametrize("expanded", [True, False])
def test_attention_that_rotates_is_attention_of_what_was_rotated(elements: int, expanded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 2, 2, 4, 6, dtype=torch.float64, generator=generator).requires_grad_()
    positions = torch.arange(5).expand(2, -1) if expanded else torch.tensor([[0, 1, 2, 3, 4], [7, 0, 1, 0, 9]])
    tables = rotary_tables(FREQUENCIES, positions)
    before = qkv.detach().clone()
    found, expected = causal_attention(qkv, tables), causal_attention(_rotated(qkv, *tables))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    of_both = (torch.autograd.grad(out, qkv, weights)[0] for out in (found, expected))
    torch.testing.assert_close(*of_both, rtol=1e-12, atol=1e-13)
    assert torch.equal(qkv, before), "what is rotated in place is a copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_that_rotates_rounds_as_the_rotation_does(elements: int, dtype: torch.dtype) -> None:
    """Over two blocks of rows."""
    s, generator = BLOCK + 5, torch.Generator().manual_seed(0)
    qkv = torch.randn(s, 2, 1, 3, 6, generator=generator).to(dtype).requires_grad_()
    tables = rotary_tables(FREQUENCIES.float(), torch.arange(s).expand(2, -1))
    found, expected = causal_attention(qkv, tables), causal_attention(_rotated(qkv, *tables))
    assert torch.equal(found, expected)
    weights = torch.randn(found.shape, generator=generator).to(dtype)
    assert torch.equal(*(torch.autograd.grad(out, qkv, weights)[0] for out in (found, expected)))


def test_products_are_added_by_pieces_in_fp32(elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(17, n, generator=generator).bfloat16() for n in (23, 9))
    total = torch.ones(23, 9)
    add_transposed_product(total, left, right)
    assert torch.equal(total, 1.0 + torch.mm(left.t(), right).float())
