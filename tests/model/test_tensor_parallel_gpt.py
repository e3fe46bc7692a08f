"""The GPT on tensor-parallel ranks, outside of training: logits for whoever asks, with gradients that are whole."""

import pytest
import torch
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.parameters import shard
from megalite.layout.ranks import ParallelLayout
from megalite.model.parameters import gpt_parameters
from megalite.tensor_parallel.collectives import TensorGroup
from tests.layout.shards import cut
from tests.model.small import perturbed, random_batch, rank_of, small
from tests.ranks import run_ranks

CONFIG = small(tie_embeddings=False)


def _logits_and_gradients(context: ParallelContext | None, sequence_parallel: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The results of one process or, with a context, the rank's part of them."""
    model = perturbed(CONFIG)
    if context is not None and (tp := TensorGroup.of(context.group("tp"))):
        model = rank_of(model, tp, sequence_parallel=sequence_parallel)
    logits = model.logits(random_batch(CONFIG))
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.ndim > 1}
    return logits.detach(), gradients


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_rank_gets_all_logits_and_whole_gradients(sequence_parallel: bool) -> None:
    expected, gradients = _logits_and_gradients(None, False)
    records = {record.name: record for record in gpt_parameters(CONFIG)}
    ranks = run_ranks(_logits_and_gradients, 2, sequence_parallel, layout=ParallelLayout(tp=2))
    for index, (logits, found) in enumerate(ranks):
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            whole = cut(gradients[name], shard(records[name], 2, index))
            torch.testing.assert_close(gradient, whole, rtol=1e-10, atol=1e-10)
