"""Attention by blocks of rows is torch's attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.causal_attention import BLOCK, causal_attention
from megalite.kernels.dropout import DropoutStreams, hash_dropout
from megalite.model.attention import Attention, BlockInputs, document_mask
from megalite.tensor_parallel.layers import Placement
from tests.model.small import CPU, small


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


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_dropout_of_probabilities_is_the_hash_of_their_places(groups: int, masked: bool) -> None:
    """Against the definition, written out per head."""
    s, b, heads, d, p = 9, 2, 4, 6, 0.4
    config = small(num_attention_heads=heads, num_key_value_heads=groups, attention_dropout=p, hidden_size=24)
    attention = Attention(config, Placement(torch.float64, CPU))
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(s, b, groups, heads // groups + 2, d, dtype=torch.float64, generator=generator)
    mask = document_mask(torch.arange(s).div(4, rounding_mode="floor").expand(b, s), torch.float64) if masked else None
    streams = DropoutStreams(3, [(0,)], CPU)
    key = streams.attention_keys(torch.arange(b) + 5, torch.arange(heads), torch.arange(s))[0,]
    found = attention.core(qkv, BlockInputs(None, mask, key)).view(s, b, heads, d)
    seen = hash_dropout(torch.ones(b, heads, s, s, dtype=torch.float64), p, key)  # 0 or 1 / (1 - p)
    assert 0.2 < (seen == 0).double().mean() < 0.6
    allowed = torch.ones(s, s).tril().bool().expand(b, 1, s, s) if mask is None else mask == 0
    for head in range(heads):
        group, query = divmod(head, heads // groups)
        queries, keys, values = (qkv[:, :, group, at].transpose(0, 1) for at in (query, -2, -1))  # [b, s, d]
        scores = (queries @ keys.transpose(1, 2) / d**0.5).masked_fill(~allowed[:, 0], -torch.inf)
        expected = (scores.softmax(-1) * seen[:, head]) @ values
        torch.testing.assert_close(found[:, :, head].transpose(0, 1), expected)


def test_every_coordinate_of_a_probability_changes_its_mask_and_parts_are_those_of_the_whole() -> None:
    def dropped(seed: int = 1, layer: int = 0, first: int = 0, heads: tuple[int, int] = (0, 6)) -> Tensor:
        keys = DropoutStreams(seed, [(0,), (1,)], CPU).attention_keys(
            torch.arange(first, first + 3), torch.arange(*heads), torch.arange(40)
        )
        return hash_dropout(torch.ones(3, heads[1] - heads[0], 40, 40), 0.5, keys[layer,])

    whole = dropped()
    assert torch.equal(dropped(heads=(2, 4)), whole[:, 2:4])
    assert torch.equal(dropped(first=1)[:2], whole[1:])
    others = [dropped(seed=2), dropped(layer=1), dropped(first=3), dropped(heads=(6, 12)), whole.transpose(2, 3)]
    for other in (*others, whole.roll(1, 0), whole.roll(1, 1), whole.roll(1, 2), whole.roll(1, 3)):
        assert 0.47 < (other == whole).double().mean() < 0.53, "independent"
