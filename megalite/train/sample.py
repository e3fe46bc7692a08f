"""Text from the model: the newest token's distribution, sampled and appended, one token at a time."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.data.batch import Batch
from megalite.model.gpt import GPT
from megalite.parallel.context import ParallelContext
from megalite.train.training import Training

TEMPERATURE = 0.8
TOP_K = 50


@torch.no_grad()
def sample(
    training: Training, context: ParallelContext, prompt: Sequence[int], count: int, *, seq_length: int, seed: int
) -> list[int]:
    """`count` tokens that follow `prompt` (at least one token), the same for the same weights and seed.

    All ranks of a model must call it; each returns the tokens, which the end of the pipeline draws.
    The window is always `seq_length` long, so that a compiled model sees one shape; what stands behind the newest token
    cannot reach it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for chunk in training.chunks:
        chunk.eval()
    for _ in range(count):
        window = torch.zeros(1, seq_length, dtype=torch.int64)
        recent = tokens[-seq_length:]
        window[0, : len(recent)] = torch.tensor(recent)
        batch = Batch(
            tokens=window,
            labels=torch.zeros_like(window),
            loss_mask=torch.zeros_like(window, dtype=torch.bool),
            positions=torch.arange(seq_length).unsqueeze(0),
            documents=None,
            first_sample=0,
        )
        hidden = training.executor.hidden(batch.to(context.device))
        drawn = None if hidden is None else _draw(training.chunks[-1], hidden, len(recent) - 1, generator)
        tokens.append(_told(drawn, context))
    for chunk in training.chunks:
        chunk.train()
    return tokens[len(prompt) :]


def _draw(end: GPT, hidden: Tensor, position: int, generator: torch.Generator) -> Tensor:
    """The token [1] after `position`, from final hidden states [s, 1, h] (or [s/t, 1, h])."""
    logits = end.head_logits(end.whole_sequence(hidden)[position]).flatten().float().cpu()
    best, candidates = logits.topk(min(TOP_K, logits.numel()))
    return candidates[torch.multinomial(torch.softmax(best / TEMPERATURE, dim=0), 1, generator=generator)]


def _told(drawn: Tensor | None, context: ParallelContext) -> int:
    """The token that the end of the pipeline has drawn, on all its ranks."""
    pipeline = context.group("pp-forward")
    token = torch.zeros(1, dtype=torch.int64) if drawn is None else drawn
    if pipeline is not None:
        token = token.to(context.device)
        dist.broadcast(token, group=pipeline, group_src=pipeline.size() - 1)
    return int(token)
