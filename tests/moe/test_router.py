"""The sigmoid router is exact wherever its logits are: weights, balancing loss and gradients beside 80 digits."""

from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from megalite.config.schema import MoEConfig
from megalite.data.batch import whole_batch
from megalite.moe.balance import RouterMetrics, TokenMasks, add_router_losses
from megalite.moe.router import Router

EXPERTS, TOKENS, TOP = 8, 6, 3
OFFSETS = [-3e38, -1e4, -120.0, -88.0, -60.0, -50.0, -20.0, 0.0, 20.0, 60.0, 1e4, 3e38]
Row = list[Decimal]


def router_of(dtype: torch.dtype = torch.float32, **settings: object) -> Router:
    values = {"num_experts": EXPERTS, "top_k": TOP, "score": "sigmoid", **settings}
    return Router(MoEConfig(**values), 4, dtype, torch.device("cpu"))  # type: ignore[arg-type]


def logits_at(offset: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Around the offset, no two of a token alike."""
    noise = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (offset + noise * max(2.0, abs(offset) / 100)).to(dtype)


def exact(row: Tensor, chosen: list[int], grad: Tensor, *, divide: bool) -> tuple[Row, Row, Decimal]:
    """Sigmoids of one token's chosen logits, divided by their sum or not, the gradient of the logits, and how large the
    parts are that it is a difference of."""
    with localcontext(prec=80, Emin=-(10**17), Emax=10**17):
        logits = [Decimal(row[expert].item()) for expert in chosen]
        common = max(logits).min(0) if divide else Decimal(0)  # the sum divides it away
        scores = [(z - common).exp() / (1 + z.exp()) if z < 0 else 1 / (1 + (-z).exp()) for z in logits]
        slopes = [1 / (1 + z.exp()) if z < 0 else (-z).exp() / (1 + (-z).exp()) for z in logits]  # 1 - s
        total = sum(scores) if divide else Decimal(1)
        values = [score / total for score in scores]
        given = [Decimal(number.item()) for number in grad]
        mean = sum(v * g for v, g in zip(values, given, strict=True)) if divide else Decimal(0)
        grads = [v * s * (g - mean) for v, s, g in zip(values, slopes, given, strict=True)]
        scale = max(v * s for v, s in zip(values, slopes, strict=True)) * max(map(abs, given))
        return values, grads, scale


def assert_near(found: Tensor, wanted: Row, row: Tensor, scale: Decimal) -> None:
    """To some units in the last place of numbers of that scale, and of the logits, whose differences decide."""
    numbers, eps = torch.tensor([float(one) for one in wanted], dtype=torch.float64), torch.finfo(found.dtype).eps
    bound = eps * (8 + 4 * min(row.abs().max().item(), 100.0)) * float(scale) + torch.finfo(found.dtype).tiny
    assert (found.double() - numbers).abs().max() <= bound, (found, numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("settings", [{}, {"normalize_weights": False}, {"top_k": 1}, {"num_groups": 4, "top_k": 4}])
def test_weights_and_their_gradients_are_exact(settings: dict[str, object], offset: float, dtype: torch.dtype) -> None:
    router = router_of(dtype, **settings, **({"top_k_groups": 2} if "num_groups" in settings else {}))
    logits = logits_at(offset, dtype).requires_grad_()
    experts, weights = router.choose(logits)
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    weights.backward(grad)
    assert logits.grad is not None
    divide = router.moe.normalize_weights and router.moe.top_k > 1
    for token in range(TOKENS):
        chosen, row = experts[token].tolist(), logits[token].detach()
        if router.moe.num_groups == 1:
            assert chosen == row.argsort(descending=True)[: router.moe.top_k].tolist()
        values, grads, scale = exact(row, chosen, grad[token], divide=divide)
        assert_near(weights[token].detach(), values, row, max(values))
        assert_near(logits.grad[token, chosen], grads, row, scale)


def test_groups_are_chosen_by_their_sums_however_small_the_scores_are() -> None:
    """The group of the largest score has the smaller sum."""
    router = router_of(num_groups=2, top_k_groups=1, top_k=2)
    row = torch.tensor([[1.0, -3.0, -9.0, -9.0, 0.9, 0.8, -9.0, -9.0]])
    for offset in (0.0, -60.0, -1000.0):
        assert sorted(router.choose(row + offset).experts[0].tolist()) == [4, 5]


def test_learned_biases_choose_and_no_weight_contains_them() -> None:
    router = router_of(expert_bias_rate=0.1)
    router.expert_bias[5:] = 2.0  # more than any score
    row = logits_at(-200.0)[:1]
    experts, weights = router.choose(row)
    assert sorted(experts[0].tolist()) == [5, 6, 7]
    values, *_ = exact(row[0], experts[0].tolist(), torch.zeros(3), divide=True)
    assert_near(weights[0], values, row[0], max(values))


@pytest.mark.parametrize("aux_loss", ["microbatch", "sequence", "global"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_no_logits_escape_the_balancing_loss(offset: float, aux_loss: str) -> None:
    """E / (k T^2) * sum over experts of (choices * probabilities), of 80 digits, and what it asks of the logits."""
    router = router_of(aux_loss=aux_loss, aux_loss_coeff=1.0)
    logits = logits_at(offset).requires_grad_()
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch = whole_batch(tokens, tokens, tokens == 0, torch.arange(TOKENS).expand(1, -1), None, 0)
    masks = TokenMasks.of(batch, torch.ones(()), None)
    nothing = RouterMetrics(*[torch.zeros(())] * 7)
    loss = add_router_losses(router, logits, router.choose(logits).experts, masks, nothing).balance
    loss.backward()
    assert logits.grad is not None
    largest = [row.argsort(descending=True)[:TOP].tolist() for row in logits.detach()]
    counts = torch.tensor([sum(expert in its for its in largest) for expert in range(EXPERTS)])
    share = torch.full((EXPERTS,), 1 / EXPERTS) if aux_loss == "global" else counts / (TOP * TOKENS)
    wanted = 0.0
    for row, found in zip(logits.detach(), logits.grad, strict=True):
        values, grads, _ = exact(row, [*range(EXPERTS)], EXPERTS * share, divide=True)
        wanted += sum(float(value) * EXPERTS * one.item() for value, one in zip(values, share, strict=True))
        assert (found - torch.tensor([float(one) for one in grads])).abs().max() < 1e-4
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
