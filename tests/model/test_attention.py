"""Attention by blocks of rows is torch's attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalite.model.attention import FASTEST_FIRST, document_mask, fastest_first
from megalite.model.causal_attention import BLOCK, causal_attention


def reference(qkv: Tensor) -> Tensor:
    """[s, b, groups, q_per_kv + 2, d] -> [s, b, heads * d], keys and values repeated for every query head."""
    s, b, _, q_and_kv, _ = qkv.shape
    queries = qkv[:, :, :, :-2].flatten(2, 3)
    keys, values = (qkv[:, :, :, index].repeat_interleave(q_and_kv - 2, dim=2) for index in (-2, -1))
    heads = (x.permute(1, 2, 0, 3) for x in (queries, keys, values))
    return F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, -1)


@pytest.mark.parametrize("q_per_kv", [1, 3])
@pytest.mark.parametrize("s", [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 30])
def test_output_and_gradient_by_blocks_are_those_of_torch(s: int, q_per_kv: int) -> None:
    generator = torch.Generator().manual_seed(s)
    qkv = torch.randn(s, 2, 3, q_per_kv + 2, 8, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(s, 2, 3 * q_per_kv * 8, dtype=torch.float64, generator=generator)
    ours, theirs = causal_attention(qkv), reference(qkv)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    gradients = (torch.autograd.grad(out, qkv, weights)[0] for out in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    qkv = torch.randn(7, 2, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(causal_attention, qkv)


def test_the_document_mask_is_causal_and_block_diagonal() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]]), torch.float32)
    allowed = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
    ]
    assert torch.equal(mask.exp().int(), torch.tensor(allowed, dtype=torch.int32).unsqueeze(1))


def test_cudnn_is_asked_first_but_not_for_dropout_that_it_would_round() -> None:
    assert [fastest_first(dropout)[0] for dropout in (0.0, 0.125)] == [SDPBackend.CUDNN_ATTENTION] * 2
    assert SDPBackend.CUDNN_ATTENTION not in fastest_first(0.1)
    assert len(fastest_first(0.1)) == len(FASTEST_FIRST) - 1
