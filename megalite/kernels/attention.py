"""softmax(q k^T / sqrt(d)) v of whole sequences, by the fastest kernel that takes the mask, the device and the sizes.

Queries [s, b, groups, q_per_kv, d], keys [s, b, groups, 1, d] and values [s, b, groups, 1, e] give [s, b, heads * e].
The size e of values may differ from d.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.attention_by_rows import attention_by_rows
from megalite.kernels.attention_mask import MAX_ROWS, AttentionMask, DocumentRows
from megalite.kernels.dropout import DropoutKey, hash_dropout


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: AttentionMask,
    dropout: tuple[float, DropoutKey] | None = None,
    *,
    plain: bool = False,
) -> Tensor:
    """`dropout`: the share of probabilities that are dropped, and which. `plain`: without a kernel of torch's."""
    form = mask.form
    if isinstance(form, DocumentRows):
        return attention_by_rows(queries, keys, values, form)
    if form is None and dropout is None and queries.is_cpu and len(queries) <= MAX_ROWS:
        return attention_by_rows(queries, keys, values, None)
    if dropout is not None or plain:
        return _plain_attention(queries, keys, values, form if isinstance(form, Tensor) else None, dropout)
    queries, keys, values = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (queries, keys, values))
    grouped = queries.shape[1] != keys.shape[1]
    if form is None or isinstance(form, Tensor):
        out = F.scaled_dot_product_attention(
            queries, keys, values, form, is_causal=form is None, enable_gqa=grouped
        )  # [b, heads, s, e]
    else:
        from torch.nn.attention.flex_attention import flex_attention

        out = flex_attention(queries, keys, values, block_mask=form, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3).flatten(2)


def _plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropout: tuple[float, DropoutKey] | None
) -> Tensor:
    """The same by plain products, which keep the probabilities [b, heads, s, s], with dropout on these: the masks that
    torch's fused kernels draw depend on the layout."""
    s, d = len(queries), queries.shape[-1]
    if mask is None:
        mask = torch.full((s, s), float("-inf"), dtype=queries.dtype, device=queries.device).triu(1)
    else:
        mask = mask.unsqueeze(1)
    queries, keys, values = (part.permute(1, 2, 3, 0, 4) for part in (queries, keys, values))  # [b, groups, q, s, d]
    scores = (queries * d**-0.5) @ keys.transpose(-1, -2) + mask  # [b, groups, q_per_kv, s, s]
    probabilities = torch.softmax(scores, dim=-1).flatten(1, 2)
    if dropout is not None:
        share, key = dropout
        probabilities = hash_dropout(probabilities, share, key)
    return (probabilities.view(scores.shape) @ values).permute(3, 0, 1, 2, 4).flatten(2)
