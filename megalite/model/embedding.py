"""Word and learned position embeddings; the word table's gradient can go straight into a gradient buffer (a sink).

Autograd's own gradient of a table is a dense tensor of its size per microbatch, in the table's dtype. The sink receives
the rows of the batch's tokens in fp32 (fp64 in fp64), in a fixed order: equal batches give equal bits. On a CPU nothing
else is touched.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.model.parameters import padded_vocabulary


class Table(nn.Module):
    """weight [rows, h]."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device))


class Embedding(nn.Module):
    """Word, plus position where positions are learned. A stage that only ends the model holds it for its tied head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, positions: bool) -> None:
        super().__init__()
        self.word = Table(padded_vocabulary(config), config.hidden_size, dtype, device)
        if positions:
            assert config.max_positions is not None
            self.position = Table(config.max_positions, config.hidden_size, dtype, device)

    def forward(self, tokens: Tensor, positions: Tensor, sink: Tensor | None) -> Tensor:
        """tokens, positions [b, s] -> [s, b, h]"""
        tokens = tokens.t()
        weight = self.word.weight
        embedded = F.embedding(tokens, weight) if sink is None else _SunkEmbedding.apply(tokens, weight, sink)
        if hasattr(self, "position"):
            embedded = embedded + F.embedding(positions.t(), self.position.weight)
        return embedded


class _SunkEmbedding(torch.autograd.Function):
    """F.embedding whose gradient is added to `sink` [rows, h]; autograd sees none."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, sink: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink = sink
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        add_rows(ctx.sink, tokens.flatten(), grads[0].flatten(0, 1).to(ctx.sink.dtype))
        return None, None, None


def add_rows(sink: Tensor, rows: Tensor, values: Tensor) -> None:
    """sink[rows[i]] += values[i], repeated rows added up in a fixed order. sink [rows, h], rows [n], values [n, h]."""
    if sink.is_cuda:  # index_add_ would add by atomics, in any order; the embedding's own backward sorts
        sink += torch.ops.aten.embedding_dense_backward(values, rows, len(sink), -1, False)
    else:
        sink.index_add_(0, rows, values)
