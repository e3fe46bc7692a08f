"""One step: the norm that clips is right at real sizes, and a GPU is never waited for."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.config.derive import derive
from megalite.config.schema import Config, MoEConfig
from megalite.data.batch import Batch, whole_batch
from megalite.kernels import grouped
from megalite.launch.context import ParallelContext
from megalite.model.init import start_values
from megalite.model.parameters import gpt_parameters
from megalite.optim.gradients import norm_of
from megalite.train.build import build_training, derive_device, fill_with_start_values
from megalite.train.step import TrainStep
from tests.kernels import plain_expert_rows
from tests.optim.small_model import masked_batches, small_config
from tests.ranks import run_ranks


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_norm_of_a_large_fp32_buffer_is_exact_to_fp32(device: str) -> None:
    """torch's own CPU norm is 2 % short here: it adds millions of squares in a few fp32 sums."""
    gradients = torch.full(((1 << 26) + 7,), 1e-3, device=device)
    assert float(norm_of([gradients])) == pytest.approx(1e-3 * ((1 << 26) + 7) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_not_finite_where_a_gradient_is_not(dtype: torch.dtype) -> None:
    gradients = torch.ones(1 << 18, dtype=dtype)
    for value in (torch.nan, torch.inf):
        gradients[200_000] = value
        assert not torch.isfinite(norm_of([gradients]))


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "ffn_hidden_size": 128,
    "num_shared_experts": 1,
    "score": "sigmoid",
    "expert_bias_rate": 0.1,
    "capacity_factor": 1.0,
}


def test_a_step_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors without values nothing can be asked. With the kernel for all experts, as on the GPUs that have it."""
    monkeypatch.setattr(grouped, "_has_kernel", lambda device: True)
    plain_expert_rows.stand_in(monkeypatch)
    config = Config(device="cpu", precision="bf16")
    config.model.vocab_size, config.model.num_layers, config.train.compile = 300, 1, False
    config.model.moe, config.optimizer.qk_clip = MoEConfig(**EXPERTS), 100.0
    config.optimizer.ema_half_life_steps = 9.0
    context = ParallelContext(dtype=torch.bfloat16)
    config = derive_device(derive(config), context)
    with FakeTensorMode():
        step = TrainStep(build_training(config, context), config.optimizer, context)
        batch = batch_on(context.device)
        for refused in (False, True):
            step([batch], batch.tokens.numel(), 1e-3, refused=refused)


@pytest.mark.gpu
@pytest.mark.parametrize("moe", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_step_never_waits_for_the_device(moe: dict[str, Any]) -> None:
    config = Config()
    config.model.vocab_size, config.train.compile, config.model.moe = 300, False, MoEConfig(**moe)
    config.optimizer.ema_half_life_steps = 9.0
    context = ParallelContext(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    if moe and not grouped._has_kernel(context.device):
        pytest.skip("this GPU multiplies experts one by one")
    config = derive_device(derive(config), context)
    training = build_training(config, context)
    training.buffers.fill(start_values(gpt_parameters(config.model), config.seed))
    step = TrainStep(training, config.optimizer, ParallelContext())
    batch = batch_on(context.device)
    tokens = batch.tokens
    masked = [each.to(context.device) for each in masked_batches(config, config.train.global_batch_size, 1)]
    first = step([batch], tokens.numel(), 1e-3).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [step([batch], tokens.numel(), 1e-3) for _ in range(3)]
        refused = step(masked, 0, 1e-3, refused=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched[-1].read().loss < first.loss
    figures = refused.read()
    assert (figures.refused, figures.skipped, figures.loss) == (True, True, 0.0)


def batch_on(device: torch.device) -> Batch:
    tokens = torch.randint(300, (8, 256), device=device)
    positions = torch.arange(256, device=device).expand_as(tokens)
    return whole_batch(tokens, tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool), positions, None, 0)


def sums_of_steps(context: ParallelContext, ahead: bool) -> tuple[list[int], list[int]]:
    """Of three steps: how many sums over ranks each waits for, and the tokens that it tells of."""
    config = small_config()
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    step = TrainStep(training, config.optimizer, context)
    add_up, seen = step._all_reduce, []

    def counted(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        seen[-1] += 1
        return add_up(tensor, group)

    step._all_reduce = counted  # type: ignore[method-assign]
    tokens = []
    for number in range(3):
        seen.append(0)
        batch = masked_batches(config, config.train.global_batch_size, 1)
        local = 5 + number + context.rank
        tokens.append(step(batch, local, 1e-3, next_local_tokens=local + 1 if ahead else None).read().batch_tokens)
    training.gather.finish()
    return seen, tokens


@pytest.mark.parametrize(("ahead", "sums"), [(True, [2, 1, 1]), (False, [2, 2, 2])])
def test_a_count_of_tokens_that_is_known_ahead_waits_for_no_sum_of_its_own(ahead: bool, sums: list[int]) -> None:
    """Such a sum would queue behind the parameters that are on their way."""
    for seen, tokens in run_ranks(sums_of_steps, 2, ahead):
        assert seen == sums
        assert tokens == [11, 13, 15]
