"""Attention in tiles is attention: outputs and gradients of all tiles together are those of the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import attention_tile
from megalite.kernels.attention_tile import attend, attend_backward, merge_

B, HEADS, GROUPS, S, D, TILE = 2, 4, 2, 24, 8, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 24])
VISIBLE = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]).tril().unsqueeze(1)  # [b, 1, s, s]


def plain_attend(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool = False, mask: Any = None) -> Any:
    return attention_tile._plain(queries, keys, values, causal, mask)


def plain_backward(*tensors: Tensor, causal: bool = False, mask: Any = None) -> Any:
    return attention_tile._plain_backward(*tensors, causal, mask)


KERNELS = [(attend, attend_backward), (plain_attend, plain_backward)]


def drawn(heads: int, seed: int) -> Tensor:
    return torch.randn(B, heads, S, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("forward", "backward"), KERNELS, ids=["kernel of the device", "plain products"])
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_merge_to_the_whole_in_any_order(forward: Callable, backward: Callable, masked: bool) -> None:
    queries, keys, values = (drawn(heads, seed).requires_grad_() for seed, heads in enumerate((HEADS, GROUPS, GROUPS)))
    visible = VISIBLE if masked else torch.ones(B, 1, S, S, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(queries, keys, values, visible, enable_gqa=True)
    grad = drawn(HEADS, 3)
    expected_grads = torch.autograd.grad(expected, (queries, keys, values), grad)

    tiles: list[tuple[slice, slice, dict[str, Any]]] = []
    for first in range(0, S, TILE):
        for key in range(0, first + TILE, TILE):
            rows, columns = slice(first, first + TILE), slice(key, key + TILE)
            how: dict[str, Any] = {"mask": visible[:, :, rows, columns]} if masked else {"causal": key == first}
            tiles.insert(0, (rows, columns, how))
    out, lse = torch.zeros_like(queries), torch.full((B, HEADS, S), float("-inf"), dtype=torch.float64)
    grads = [torch.zeros_like(x) for x in (queries, keys, values)]
    with torch.no_grad():
        for rows, columns, how in tiles:
            found = forward(queries[:, :, rows], keys[:, :, columns], values[:, :, columns], **how)
            merge_(out[:, :, rows], lse[:, :, rows], *found)
        for rows, columns, how in tiles:
            inner = (queries[:, :, rows], keys[:, :, columns], values[:, :, columns], out[:, :, rows], lse[:, :, rows])
            parts = backward(grad[:, :, rows], *inner, **how)
            for total, part, where in zip(grads, parts, (rows, columns, columns), strict=True):
                total[:, :, where] += part
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("forward", "_"), KERNELS, ids=["kernel of the device", "plain products"])
def test_a_query_that_sees_nothing_says_so(forward: Callable, _: Callable) -> None:
    """torch's kernel gives its log-sum-exp as 0: merged, it would count like a key."""
    mask = torch.ones(B, 1, S, S, dtype=torch.bool)
    mask[:, :, 3] = False
    out, lse = forward(drawn(HEADS, 0), drawn(GROUPS, 1), drawn(GROUPS, 2), mask=mask)
    assert torch.all(out[:, :, 3] == 0)
    assert torch.all(lse[:, :, 3] == float("-inf"))
    assert torch.isfinite(lse[:, :, :3]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_statistics_in_fp32(dtype: torch.dtype) -> None:
    parts = [drawn(heads, seed).to(dtype) for seed, heads in enumerate((HEADS, GROUPS, GROUPS))]
    wide = attend(*(part.double() for part in parts), causal=True)
    for forward, _ in KERNELS:
        out, lse = forward(*parts, causal=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(lse.double(), wide[1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(out.double(), wide[0], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [D, D + 4], ids=["flash", "plain products"])
def test_tiles_of_half_of_the_rows_are_those_of_a_cpu(size: int) -> None:
    """As a ring has them: statistics of some rows do not lie side by side, and flash reads them as if they did."""
    shapes = [(B, heads, S, size) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(at)) for at, shape in enumerate(shapes)]
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        queries, keys, values, grad = (part.to(torch.bfloat16).to(device, dtype) for part in parts)
        out, lse = attend(queries, keys, values, causal=True)
        rows = slice(S // 2, S)
        later = (grad[:, :, rows], queries[:, :, rows], keys[:, :, : S // 2], values[:, :, : S // 2])
        grads = attend_backward(*later, out[:, :, rows], lse[:, :, rows])
        found.append([each.double().cpu() for each in (out, lse, *grads)])
    for ours, exact in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, exact, rtol=5e-2, atol=5e-2)
