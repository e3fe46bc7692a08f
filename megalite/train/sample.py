"""Text from the model: the newest token's distribution, sampled and appended, one token at a time."""

from collections.abc import Sequence

import torch

from megalite.data.batch import Batch
from megalite.model.gpt import GPT

TEMPERATURE = 0.8
TOP_K = 50


@torch.no_grad()
def sample(
    model: GPT, prompt: Sequence[int], count: int, *, seq_length: int, device: torch.device, seed: int
) -> list[int]:
    """`count` tokens that follow `prompt` (at least one token), the same for the same weights and seed.

    All ranks of a model must call it; each returns the tokens.
    The window is always `seq_length` long, so that a compiled model sees one shape; what stands behind the newest token
    cannot reach it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
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
        hidden = model.whole_sequence(model(batch.to(device)))  # [s, 1, h]
        logits = model.head_logits(hidden[len(recent) - 1]).flatten().float().cpu()
        best, candidates = logits.topk(min(TOP_K, logits.numel()))
        choice = torch.multinomial(torch.softmax(best / TEMPERATURE, dim=0), 1, generator=generator)
        tokens.append(int(candidates[choice]))
    model.train()
    return tokens[len(prompt) :]
