"""The head and its loss, for tests that name their settings."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megalite.model import loss as loss_module
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.cross_entropy import TokenLoss


def token_loss_of(
    weight: Tensor,
    *,
    vocab_size: int,
    padded_vocab: int | None = None,
    group: TensorGroup | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenLoss:
    rows = len(weight)
    return TokenLoss(rows, padded_vocab or rows, group, vocab_size, label_smoothing, z_loss)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    scale: Tensor,
    *,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
    sequence_parallel: bool = False,
    compile: bool = False,
    **settings: Any,
) -> Tensor:
    """`settings` are those of `token_loss_of`."""
    return loss_module.linear_cross_entropy(
        hidden,
        weight,
        labels,
        mask,
        scale,
        token_loss_of(weight, **settings),
        chunk_tokens=chunk_tokens,
        main_grad=main_grad,
        sequence_parallel=sequence_parallel,
        compile=compile,
    )


def reference_losses(logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float) -> Tensor:
    """torch's losses [n] of all logits [n, vocabulary]."""
    losses = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
    return losses + z_loss * logits.logsumexp(-1).square()
