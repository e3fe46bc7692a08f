"""A product that is added to a wider total is the product at once, whatever the tiles and pieces."""

import pytest
import torch

from megalite.kernels import products
from megalite.kernels.products import add_transposed_product


@pytest.mark.parametrize("elements", [1, 45, 10**6], ids=["a-row", "some-rows", "whole"])
def test_a_bf16_product_is_added_in_fp32(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    for name, size in (("SMALL", 0), ("TILE_ELEMENTS", 90), ("CACHED_ELEMENTS", elements)):
        monkeypatch.setattr(products, name, size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(17, n, generator=generator).bfloat16() for n in (23, 9))
    total = torch.ones(23, 9)
    add_transposed_product(total, left, right)
    assert torch.equal(total, 1.0 + torch.mm(left.t(), right).float())
