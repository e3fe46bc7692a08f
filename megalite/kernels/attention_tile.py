"""Attention of some queries to some keys, with what it takes to merge it with that of other keys.

A tile gives the output over its own keys and the log-sum-exp of its scores. Its gradients follow from the output and
the log-sum-exp over all keys, so that tiles can be computed one after the other and again in backward (ring attention,
arXiv 2310.01889). Query heads share key and value heads in groups; nothing is copied for it.
"""

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.products import statistics_dtype

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [b, heads, q, e] and log-sum-exp [b, heads, q] (fp32, fp64 in fp64) of queries [b, heads, q, d] to keys
    [b, key-value heads, k, d] and values [b, key-value heads, k, e].

    `causal`: q = k, and query i sees keys 0..i. `mask` [b, 1, q, k] is True where a query sees a key; of one that sees
    none the output is 0, the log-sum-exp -inf.
    """
    if _is_for_cpu(queries, values):
        bias = None if mask is None else _bias(mask, queries.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, causal, attn_mask=bias)
        return out, lse if mask is None else lse.masked_fill(~mask.any(-1), float("-inf"))  # the kernel's is 0
    if _is_for_flash(queries, values, mask):
        found = _aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal)
        return found[0], found[1]
    return _plain(queries, keys, values, causal, mask)


def attend_backward(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This tile's part of the gradients of queries, keys and values; `grad`, `out` and `lse` are of all keys."""
    if _is_for_cpu(queries, values):
        bias = None if mask is None else _bias(mask, queries.dtype)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, queries, keys, values, out, lse, 0.0, causal, attn_mask=bias
        )
    if _is_for_flash(queries, values, mask):
        seed: Any = torch.empty((), dtype=torch.int64, device=queries.device)  # of a dropout that is not there
        none: Any = None
        lengths = (queries.shape[2], keys.shape[2])  # the kernel takes the statistics' memory as it lies
        return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            grad, queries, keys, values, out, lse.contiguous(), none, none, *lengths, 0.0, causal, seed, seed
        )
    return _plain_backward(grad, queries, keys, values, out, lse, causal, mask)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Output and log-sum-exp over more keys, in place: those of a tile are added. Both start with 0 and -inf."""
    both = torch.logaddexp(lse, part_lse)
    finite = both.clamp(min=torch.finfo(both.dtype).min)  # of rows that have seen no key yet
    out.mul_((lse - finite).exp_().unsqueeze(-1)).add_(part * (part_lse - finite).exp_().unsqueeze(-1))
    lse.copy_(both)


def _is_for_cpu(queries: Tensor, values: Tensor) -> bool:
    """Whether torch's flash kernel for CPUs takes the tile: values as wide as keys."""
    return queries.device.type == "cpu" and queries.shape[-1] == values.shape[-1]


def _is_for_flash(queries: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's flash kernel takes the tile: no mask, half precision, head sizes of a multiple of 8 up to 256, on
    Ampere or newer."""
    size = queries.shape[-1]
    fits = mask is None and queries.dtype in _HALF and size % 8 == 0 and size <= 256 and size == values.shape[-1]
    return queries.is_cuda and fits and torch.cuda.get_device_capability(queries.device) >= (8, 0)


def _plain(queries: Tensor, keys: Tensor, values: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention by products of whole matrices, where no kernel takes the mask, the dtype or the sizes."""
    scores = _scores(queries, keys, causal, mask)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
    out = probabilities.to(values.dtype) @ values.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _plain_backward(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = keys.shape[1]
    probabilities = (_scores(queries, keys, causal, mask) - lse.unflatten(1, (heads, -1)).unsqueeze(-1)).exp()
    wide = probabilities.dtype
    grad, own = grad.to(wide).unflatten(1, (heads, -1)), queries.to(wide).unflatten(1, (heads, -1))
    delta = (grad * out.to(wide).unflatten(1, (heads, -1))).sum(-1, keepdim=True)
    scores_grad = probabilities * (grad @ values.to(wide).unsqueeze(2).mT - delta) * queries.shape[-1] ** -0.5
    grads = (
        (scores_grad @ keys.to(wide).unsqueeze(2)).flatten(1, 2),
        (scores_grad.mT @ own).sum(2),
        (probabilities.mT @ grad).sum(2),
    )
    queries_grad, keys_grad, values_grad = (each.to(queries.dtype) for each in grads)
    return queries_grad, keys_grad, values_grad


def _scores(queries: Tensor, keys: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """[b, key-value heads, heads of a group, q, k], in the dtype of statistics."""
    wide = statistics_dtype(queries.dtype)
    own = queries.to(wide).unflatten(1, (keys.shape[1], -1))
    scores: Tensor = own @ keys.to(wide).unsqueeze(2).mT * queries.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    elif mask is not None:
        mask = mask.unsqueeze(2)
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
