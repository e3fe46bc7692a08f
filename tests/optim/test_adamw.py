"""The flat AdamW against torch's, and its promise that a skipped step did not happen."""

import pytest
import torch
from torch import Tensor

from megalite.optim.adamw import FlatAdamW

SIZE, DECAYED = 1000, 640
BETAS, EPS = (0.9, 0.95), 1e-8


def build(dtype: torch.dtype, *, device: str = "cpu", weight_decay: float = 0.1) -> FlatAdamW:
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups = [(0, DECAYED, weight_decay), (DECAYED, SIZE, 0.0)]
    return FlatAdamW(values.to(dtype).to(device), groups, BETAS, EPS)


def gradients_of(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64).to(dtype) * 3


def take(optimizer: FlatAdamW, gradients: Tensor, *, lr: float, scale: float = 1.0, skip: bool = False) -> None:
    device = optimizer.masters.device
    optimizer.step(
        gradients.to(device),
        torch.tensor(lr, dtype=torch.float64, device=device),
        gradient_scale=torch.tensor(scale, dtype=optimizer.masters.dtype, device=device),
        skip=torch.tensor(float(skip), device=device),
    )


def compare_with_torch(dtype: torch.dtype, device: str) -> float:
    """Largest relative difference from torch.optim.AdamW over 20 clipped steps of two groups and a changing rate."""
    ours = build(dtype, device=device)
    start = ours.masters.cpu().double().clone()
    theirs = [start[:DECAYED].clone().requires_grad_(), start[DECAYED:].clone().requires_grad_()]
    groups = [{"params": [theirs[0]], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS)
    for step in range(20):
        lr, gradients = 1e-2 / (step + 1), gradients_of(step, dtype)
        theirs[0].grad, theirs[1].grad = gradients.double().clone().split([DECAYED, SIZE - DECAYED])
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        take(ours, gradients, lr=lr, scale=float(norm) + 1e-6)
    assert ours.step_count.item() == 20
    expected = torch.cat([part.detach() for part in theirs])
    assert (expected - start).abs().max() > 1e-2
    return float((ours.masters.cpu().double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_twenty_clipped_steps_equal_torch(dtype: torch.dtype, bound: float) -> None:
    assert compare_with_torch(dtype, "cpu") < bound


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_twenty_clipped_steps_equal_torch_on_cuda_without_waiting(dtype: torch.dtype, bound: float) -> None:
    assert compare_with_torch(dtype, "cuda") < bound
    optimizer, gradients = build(dtype, device="cuda"), gradients_of(0, dtype).cuda()
    one = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(gradients, one * 1e-3, gradient_scale=one, skip=one * 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_skipped_step_leaves_everything_byte_equal(dtype: torch.dtype, steps_before: int) -> None:
    optimizer = build(dtype)
    for step in range(steps_before):
        take(optimizer, gradients_of(step, dtype), lr=1e-2)
    state = (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.step_count)
    before = [tensor.clone() for tensor in state]
    bad = gradients_of(9, dtype)
    bad[::7] = torch.nan
    bad[1::7] = torch.inf
    take(optimizer, bad, lr=1e-2, scale=float("nan"), skip=True)
    assert all(torch.equal(after, kept) for after, kept in zip(state, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_step_after_a_skipped_one_is_as_if_it_had_not_been(dtype: torch.dtype) -> None:
    with_skip, without = build(dtype), build(dtype)
    for step in range(4):
        take(with_skip, gradients_of(step, dtype), lr=1e-2)
        take(with_skip, gradients_of(50, dtype), lr=1e-2, skip=True)
        take(without, gradients_of(step, dtype), lr=1e-2)
    assert torch.equal(with_skip.masters, without.masters)
    assert with_skip.step_count.item() == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weight_decay_touches_its_group_alone(dtype: torch.dtype) -> None:
    decayed, plain = build(dtype, weight_decay=0.5), build(dtype, weight_decay=0.0)
    for optimizer in (decayed, plain):
        take(optimizer, gradients_of(0, dtype), lr=1e-2)
    assert torch.equal(decayed.masters[DECAYED:], plain.masters[DECAYED:])
    assert not torch.isclose(decayed.masters[:DECAYED], plain.masters[:DECAYED], rtol=1e-4, atol=0).any()


def test_views_of_the_masters_are_updated_in_place() -> None:
    optimizer = build(torch.float32)
    view = optimizer.masters[100:300].view(10, 20)
    before = view.clone()
    take(optimizer, gradients_of(0, torch.float32), lr=1e-2)
    assert (view != before).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_continues_from_copied_state(dtype: torch.dtype) -> None:
    """The three tensors named in the class are the whole state."""
    original, resumed = build(dtype), build(dtype)
    take(original, gradients_of(0, dtype), lr=1e-2)
    for name in ("masters", "exp_avg", "exp_avg_sq", "step_count"):
        getattr(resumed, name).copy_(getattr(original, name))
    for optimizer in (original, resumed):
        take(optimizer, gradients_of(1, dtype), lr=1e-2)
    assert torch.equal(original.masters, resumed.masters)
