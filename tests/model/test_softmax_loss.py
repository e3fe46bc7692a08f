"""The loss as one Triton kernel beside fp64. The plain form, which runs on CPUs, is tested in test_loss.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.model.loss import TokenLoss

EPS = torch.finfo(torch.float32).eps


def in_fp64(logits: Tensor, labels: Tensor, upstream: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor]:
    """The losses, and the gradients of all columns."""
    logits = logits.double().requires_grad_()
    real = logits[:, : loss.vocab_size]
    losses = F.cross_entropy(real, labels, label_smoothing=loss.label_smoothing, reduction="none")
    losses = losses + loss.z_loss * real.logsumexp(1).square()
    (grad,) = torch.autograd.grad(losses, logits, upstream.double())
    return losses.detach(), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
@pytest.mark.parametrize(
    ("rows", "real", "columns", "spread"),
    [(5, 1000, 1024, 1.0), (3, 8193, 8208, 10.0), (1, 8192, 8192, 0.0), (2, 1, 16, 1.0), (4, 20_000, 20_000, 3e3)],
)
def test_the_kernel_is_the_loss_and_its_gradient(
    triton_device: str,
    rows: int,
    real: int,
    columns: int,
    spread: float,
    smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
) -> None:
    """Logits of one block or several, of wider memory, with padding that holds NaN.

    A logit x is scaled by log2(e), subtracted from the maximum and raised, each with a rounding, so that an exponential
    errs by eps times 4 max|x| + 4. Sums have at most two additions for each block of columns and, in pairs, fewer than
    32 for the rest: `errors` is that of a log-sum-exp, a maximum or a mean of logits.
    """
    from megalite.model.softmax_loss import BLOCK, softmax_losses

    generator = torch.Generator().manual_seed(real)
    memory = (spread * torch.randn(rows, columns + 8, generator=generator)).to(dtype)
    memory[:, real:] = torch.nan
    labels = torch.randint(0, real, (rows,), generator=generator)
    labels[0], labels[-1] = 0, real - 1
    upstream = torch.rand(rows, generator=generator)
    memory, labels, upstream = (part.to(triton_device) for part in (memory, labels, upstream))
    logits, loss = memory[:, :columns], TokenLoss(columns, None, real, smoothing, z_loss)
    exact = logits[:, :real].double()
    wanted, wanted_grad = in_fp64(logits, labels, upstream, loss)
    evaluated = softmax_losses(logits, labels, None, loss)
    assert torch.equal(logits[:, :real].double(), exact), "nothing is written"
    trained = softmax_losses(logits, labels, upstream, loss)
    assert not logits[:, real:].any(), "padding has no gradient"
    assert bool(memory[:, columns:].isnan().all())
    largest, log_sum = exact.abs().amax(1), exact.logsumexp(1)
    count = 32 + 2 * -(-columns // BLOCK)
    errors = EPS * (count + (count * smoothing + 12) * (largest + 1))
    by_square = 2 * z_loss * log_sum.abs()
    for losses in (trained, evaluated):  # two kernels on CUDA, with their own roundings
        assert bool(((losses - wanted).abs() <= errors * (1 + by_square) + 4 * EPS * wanted).all())
    share = upstream.double().unsqueeze(1) * (exact.softmax(1) * (1 + by_square).unsqueeze(1) + smoothing / real)
    share[torch.arange(rows), labels] += upstream * (1 - smoothing)
    bound = 2 * share * (errors * (1 + 2 * z_loss) + 4 * EPS).unsqueeze(1)
    rounding = torch.finfo(dtype).eps / (2 if triton_device == "cuda" else 1)  # triton's interpreter cuts bf16 off
    bound += rounding * (wanted_grad[:, :real].abs() + torch.finfo(dtype).smallest_normal)
    assert bool(((logits[:, :real] - wanted_grad[:, :real]).abs() <= bound).all())


def test_no_rows_have_no_losses(triton_device: str) -> None:
    from megalite.model.softmax_loss import softmax_losses

    logits, labels = torch.zeros(0, 16, device=triton_device), torch.zeros(0, dtype=torch.int64, device=triton_device)
    assert softmax_losses(logits, labels, None, TokenLoss(16, None, 16, 0.0, 0.0)).shape == (0,)
