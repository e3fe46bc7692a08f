"""Attention by blocks of rows is torch's attention."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.flop_counter import FlopCounterMode

from megalite.kernels.attention import attention
from megalite.kernels.attention_mask import BLOCK, MAX_ROWS, AttentionMask, DocumentRows, block_mask, dense_mask
from megalite.kernels.dropout import DropoutStreams, hash_dropout
from megalite.model.attention import Attention, BlockInputs, attention_backends, attention_mask
from megalite.model.recompute import Recompute
from megalite.tensor_parallel.layers import TpContext
from tests.model.small import CPU, random_batch, small


def reference(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """By torch, keys and values repeated for every query head -> [s, b, heads * e]."""
    repeated = (part.expand(-1, -1, -1, queries.shape[3], -1) for part in (keys, values))
    heads = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (queries, *repeated))
    out = F.scaled_dot_product_attention(*heads, mask, is_causal=mask is None)
    return out.permute(2, 0, 1, 3).flatten(2)


def parts_of(s: int, q_per_kv: int, width: int = 8) -> list[Tensor]:
    """Queries, keys, values."""
    generator = torch.Generator().manual_seed(s)
    sizes = (q_per_kv, 8), (1, 8), (1, width)
    return [torch.randn(s, 2, 3, *size, dtype=torch.float64, generator=generator).requires_grad_() for size in sizes]


def assert_same(ours: Tensor, theirs: Tensor, parts: list[Tensor]) -> None:
    """Outputs and gradients."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad(out, parts, weights) for out in (ours, theirs))
    for our, their in zip(*gradients, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("width", [8, 5])
@pytest.mark.parametrize("q_per_kv", [1, 3])
@pytest.mark.parametrize("s", [1, 5, BLOCK, 2 * BLOCK + 30])
def test_every_kernel_of_a_cpu_gives_what_torch_gives(s: int, q_per_kv: int, width: int) -> None:
    """By rows and by plain products, with values of another size than keys too."""
    parts = parts_of(s, q_per_kv, width)
    expected = reference(*parts)
    assert_same(attention(*parts, AttentionMask()), expected, parts)
    dense = AttentionMask(dense_mask(torch.zeros(2, s), torch.float64))
    assert_same(attention(*parts, dense), reference(*parts), parts)
    assert_same(attention(*parts, dense, plain=True), reference(*parts), parts)


def test_the_dense_mask_is_causal_and_block_diagonal() -> None:
    mask = dense_mask(torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]]), torch.float32)
    allowed = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
    ]
    assert torch.equal(mask.exp().int(), torch.tensor(allowed, dtype=torch.int32).unsqueeze(1))


# Lengths of the documents of two samples, in all [2, s].
DOCUMENTS = {
    "one": ([300], [300]),
    "short": ([3, 1, 60, 64, 130, 42], [100, 28, 1, 171]),
    "blocks": ([128, 128, 44], [256, 44]),
    "within a block": ([1], [1]),
    "long": ([1000], [500, 500]),
}


def packed(lengths: tuple[list[int], list[int]]) -> Tensor:
    """The number of the document of each token: int32 [2, s]."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(torch.int32)


@pytest.mark.parametrize("q_per_kv", [1, 3])
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_inside_documents_by_rows_and_by_blocks_is_that_of_the_dense_mask(
    name: str, q_per_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    documents = packed(DOCUMENTS[name])
    parts = parts_of(documents.shape[1], q_per_kv)
    expected = reference(*parts, dense_mask(documents, torch.float64))
    assert_same(attention(*parts, AttentionMask(DocumentRows.of(documents))), expected, parts)
    given = [part.detach() for part in parts]  # flex has no gradients on CPUs
    by_blocks = attention(*given, AttentionMask(block_mask(documents)))
    torch.testing.assert_close(by_blocks, expected.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_blocks_without_a_pair_inside_a_document_are_left_out(name: str) -> None:
    """Of rows and keys, in the table for CUDA; those of which every pair is inside are not looked at pair by pair."""
    documents = packed(DOCUMENTS[name])
    b, s = documents.shape
    seen = dense_mask(documents, torch.float32)[:, 0] == 0
    count = -(-s // 128)
    padded = torch.zeros(b, count * 128, count * 128, dtype=torch.bool)
    padded[:, :s, :s] = seen
    pairs = padded.view(b, count, 128, count, 128).sum((2, 4))
    rows = torch.tensor([min(128, s - 128 * block) for block in range(count)])
    table = block_mask(documents)
    assert torch.equal(table.to_dense()[:, 0].bool(), pairs > 0)
    assert torch.equal(table.full_kv_num_blocks[:, 0], (pairs == rows[:, None] * 128).sum(-1, dtype=torch.int32))


def test_work_falls_with_the_documents() -> None:
    """Products of forward and backward, of four documents by those of one. Of eight blocks of rows, one document has
    1 + 2 + .. + 8 = 36 blocks of keys, four have 4 x (1 + 2) = 12."""
    parts = parts_of(1024, 1)

    def flops(lengths: list[int]) -> int:
        mask = DocumentRows.of(packed((lengths, lengths)))
        with FlopCounterMode(display=False) as counter:
            attention(*parts, AttentionMask(mask)).sum().backward()
        return counter.get_total_flops()

    assert flops([256] * 4) / flops([1024]) == 12 / 36


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_dropout_of_probabilities_is_the_hash_of_their_places(groups: int, masked: bool) -> None:
    """Against the definition, written out per head."""
    s, b, heads, d, p = 9, 2, 4, 6, 0.4
    config = small(num_attention_heads=heads, num_key_value_heads=groups, attention_dropout=p, hidden_size=24)
    layer = Attention(config, TpContext(torch.float64, CPU), Recompute())
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(s, b, groups, heads // groups + 2, d, dtype=torch.float64, generator=generator)
    mask = dense_mask(torch.arange(s).div(4, rounding_mode="floor").expand(b, s), torch.float64) if masked else None
    streams = DropoutStreams(3, [(0,)], CPU)
    key = streams.attention_keys(torch.arange(b) + 5, torch.arange(heads), torch.arange(s))[0,]
    found = layer.core(qkv, inputs=BlockInputs(None, AttentionMask(mask), key)).view(s, b, heads, d)
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


def test_dropout_long_sequences_and_compiled_code_on_a_cpu_take_the_dense_mask() -> None:
    documents = torch.zeros(2, 16, dtype=torch.int32)
    x = torch.zeros(16, 2, 8, dtype=torch.bfloat16)

    def form(documents: Tensor | None, *, compiled: bool = False, dropout: float = 0.0) -> type:
        batch = replace(random_batch(small(), b=2, s=16), documents=documents)
        return type(attention_mask(batch, x, small(attention_dropout=dropout), "auto", compiled=compiled).form)

    assert form(None) is type(None)
    assert form(documents) is DocumentRows
    assert form(documents, compiled=True) is form(documents, dropout=0.1) is Tensor
    assert form(torch.zeros(2, MAX_ROWS + 1, dtype=torch.int32)) is Tensor


@pytest.mark.parametrize(
    ("dtype", "d", "flex"),
    [
        *((dtype, d, d >= 16) for dtype in (torch.float32, torch.bfloat16, torch.float16) for d in (8, 16, 80)),
        (torch.float64, 64, False),
    ],
)
def test_on_cuda_flex_attention_takes_the_dtypes_and_heads_that_its_kernels_take(
    dtype: torch.dtype, d: int, flex: bool
) -> None:
    documents = torch.zeros(2, 16, dtype=torch.int32)
    on_cuda: Any = SimpleNamespace(is_cuda=True, is_cpu=False, dtype=dtype, new_zeros=torch.zeros)
    for kernels, given, other in (("auto", documents, Tensor), ("flex", documents, Tensor), ("flex", None, type(None))):
        batch = replace(random_batch(small(), b=2, s=16), documents=given)
        mask = attention_mask(batch, on_cuda, small(head_size=d), kernels, compiled=True)
        assert isinstance(mask.form, BlockMask if flex else other)


def test_no_kernel_of_cudnn_meets_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward of scores with a mask gives NaN on Hopper, of some shapes."""
    asked: list[list[SDPBackend]] = []
    monkeypatch.setattr("megalite.model.attention.sdpa_kernel", lambda kernels, set_priority: asked.append(kernels))
    for kernels in ("auto", "cudnn", "flash", "fa4", "flex"):
        attention_backends(torch.device("cuda"), AttentionMask(torch.zeros(1, 1, 4, 4), kernels))
        assert SDPBackend.CUDNN_ATTENTION not in asked[-1]
        attention_backends(torch.device("cuda"), AttentionMask(None, kernels))
    assert [first for first, *_ in asked[1::2]] == [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        *[SDPBackend.FLASH_ATTENTION] * 3,
    ]
