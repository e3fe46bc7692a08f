"""One step: the norm that clips is right at real sizes, and a GPU is never waited for."""

import pytest
import torch

from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.data.batches import masked_batches
from megalite.model.init import start_values
from megalite.model.parameters import gpt_parameters
from megalite.optim.norm import gradient_norm
from megalite.parallel.context import ParallelContext
from megalite.train.job import derive_device
from megalite.train.step import TrainStep
from megalite.train.training import build_training


def test_the_norm_of_a_large_fp32_buffer_is_exact_to_fp32() -> None:
    """torch's own CPU norm is 2 % short here: it adds millions of squares in a few fp32 sums."""
    gradients = torch.full(((1 << 26) + 7,), 1e-3)
    assert float(gradient_norm([gradients])) == pytest.approx(1e-3 * ((1 << 26) + 7) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_not_finite_where_a_gradient_is_not(dtype: torch.dtype) -> None:
    gradients = torch.ones(1 << 18, dtype=dtype)
    for value in (torch.nan, torch.inf):
        gradients[200_000] = value
        assert not torch.isfinite(gradient_norm([gradients]))


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device() -> None:
    config = Config()
    config.model.vocab_size, config.train.compile = 300, False
    context = ParallelContext(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    config = derive_device(derive(config), context)
    training = build_training(config, context)
    training.buffers.fill(start_values(gpt_parameters(config.model), config.seed))
    step = TrainStep(training, config.optimizer, ParallelContext())
    tokens = torch.randint(300, (8, 256), device=context.device)
    positions = torch.arange(256, device=context.device).expand_as(tokens)
    batch = Batch(tokens, tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool), positions, None, 0)
    first = step([batch], tokens.numel(), 1e-3).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [step([batch], tokens.numel(), 1e-3) for _ in range(3)]
        refused = step(masked_batches(config, 1, context.device), 0, 1e-3, refused=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched[-1].read().loss < first.loss
    figures = refused.read()
    assert (figures.refused, figures.skipped, figures.loss) == (True, True, 0.0)
