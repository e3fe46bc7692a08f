"""Cross entropy of columns that ranks share, against torch's of all columns in fp64."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel.collectives import TensorGroup, finish
from megalite.tensor_parallel.cross_entropy import TokenLoss, work_buffer
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Case:
    """Logits [*shape, padded] about `center`, with these losses."""

    vocab: int
    padded: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    shape: tuple[int, ...] = (5, 3)
    spread: float = 1.0
    center: float = 0.0
    dtype: torch.dtype = torch.float64

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """All logits, labels (the first and the last of the vocabulary among them), upstream gradients."""
        generator = torch.Generator().manual_seed(self.padded)
        logits = torch.randn(*self.shape, self.padded, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, self.vocab, self.shape, generator=generator)
        labels.view(-1)[:2] = torch.tensor([0, self.vocab - 1])
        upstream = torch.randn(*self.shape, generator=generator, dtype=torch.float64)
        upstream.view(-1)[2] = 0.0  # masked
        return (self.center + self.spread * logits).to(self.dtype), labels, upstream

    def expected(self) -> tuple[Tensor, Tensor]:
        logits, labels, upstream = self.inputs()
        logits = logits.double().requires_grad_()
        losses = reference_losses(logits[..., : self.vocab], labels, self.label_smoothing, self.z_loss)
        return losses.detach(), torch.autograd.grad(losses, logits, upstream)[0]


def reference_losses(logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float) -> Tensor:
    flat = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), label_smoothing=label_smoothing, reduction="none"
    ).view(labels.shape)
    return flat + z_loss * logits.logsumexp(-1).square()


CASES = [
    Case(8, 8, shape=(7,)),
    Case(101, 128),  # over 3: uneven; over 2 and 4: padding at the end of a part
    Case(101, 128, label_smoothing=0.1, z_loss=1e-2, shape=(2, 3, 2)),
    Case(7, 10, label_smoothing=0.3),  # over 4: 2, 3, 2, 3 columns, the last of them all padding
    Case(3, 16, label_smoothing=0.2, z_loss=0.1, center=-1e4),  # a single rank has all that is real
    Case(2, 2, z_loss=0.5),  # more ranks than columns
    Case(40, 48, label_smoothing=0.1, z_loss=1e-3, spread=1e4),
    Case(40, 48, label_smoothing=0.1, z_loss=1e-3, center=-1e4),
    Case(40, 48, label_smoothing=0.1, z_loss=1e-3, spread=1e-9),
]


def part(case: Case, group: TensorGroup | None) -> slice:
    index, size = (0, 1) if group is None else (group.index, group.size)
    return slice(index * case.padded // size, (index + 1) * case.padded // size)


def token_loss_of(case: Case, group: TensorGroup | None, columns: int) -> TokenLoss:
    return TokenLoss(columns, case.padded, group, case.vocab, case.label_smoothing, case.z_loss)


def losses_and_gradient(case: Case, group: TensorGroup | None) -> tuple[Tensor, Tensor]:
    """Of this rank: [*shape] and [*shape, its columns]."""
    everything, labels, upstream = case.inputs()
    logits = everything[..., part(case, group)].flatten(0, -2).clone()
    token_loss = token_loss_of(case, group, logits.shape[1])
    logits[:, token_loss.real :] = -torch.inf
    (work, _), labels = work_buffer(logits), labels.flatten()
    work = work.new_empty(logits.shape)
    own = token_loss.statistics(logits, labels, work)
    exchanged = token_loss.start_exchange(own)
    losses, factor = token_loss.combine(exchanged if group is None else finish(exchanged))
    token_loss.differentiate(logits, own, labels, factor, upstream.flatten().to(losses.dtype), work)
    return losses.view(case.shape), logits.view(*case.shape, -1)


def _compute(context: ParallelContext, cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    group = TensorGroup.of(context.group("tp"))
    return [losses_and_gradient(case, group) for case in cases]


def assert_right(case: Case, of_ranks: list[tuple[Tensor, Tensor]], tolerance: float = 1e-12) -> None:
    losses, gradient = case.expected()
    for found, _ in of_ranks:
        assert torch.equal(found, of_ranks[0][0]), "the same bits on every rank"
    torch.testing.assert_close(of_ranks[0][0].double(), losses, rtol=tolerance, atol=tolerance)
    found = torch.cat([columns for _, columns in of_ranks], -1)
    torch.testing.assert_close(found.double(), gradient, rtol=tolerance, atol=tolerance)
    assert torch.count_nonzero(found[..., case.vocab :]) == 0


def test_low_precision_has_fp32_statistics() -> None:
    """4,000 equal terms: a bf16 sum stops growing at 256."""
    tolerances = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    cases = [Case(4000, 4096, 0.1, 1e-3, spread=0.5, dtype=dtype) for dtype in tolerances]
    of_ranks = run_ranks(_compute, 2, cases, layout=ParallelLayout(tp=2))
    for case, tolerance, *results in zip(cases, tolerances.values(), *of_ranks, strict=True):
        assert all(losses.dtype == torch.float32 and grad.dtype == case.dtype for losses, grad in results)
        torch.testing.assert_close(results[0][0].double(), case.expected()[0], rtol=2e-6, atol=0)
        assert_right(case, results, tolerance)


def test_a_logit_of_minus_infinity_is_a_column_without_probability() -> None:
    logits, labels = torch.tensor([[0.0, -torch.inf, 0.0]], dtype=torch.float64), torch.tensor([2])
    token_loss = token_loss_of(Case(3, 3), None, 3)
    one = torch.ones(1, dtype=torch.float64)
    losses = token_loss.losses(logits, labels, one, torch.empty(1, 3, dtype=torch.float64))
    torch.testing.assert_close(losses, torch.tensor([math.log(2)], dtype=torch.float64))
    torch.testing.assert_close(logits, torch.tensor([[0.5, 0.0, -0.5]], dtype=torch.float64))


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.9]), st.floats(0, 1e3))
def test_statistics_of_any_cut_combine_to_the_whole(
    vocab: int, padding: int, size: int, label_smoothing: float, spread: float
) -> None:
    case = Case(vocab, vocab + padding, label_smoothing, 1e-2, shape=(4,), spread=spread)
    logits, labels, upstream = case.inputs()
    losses, gradient = case.expected()
    shares: list[tuple[TokenLoss, Tensor]] = []
    for index in range(size):
        group = TensorGroup("none", size, index)
        columns = logits[:, part(case, group)].clone()
        share = token_loss_of(case, group, columns.shape[1])
        columns[:, share.real :] = -torch.inf
        shares.append((share, columns))
    work, _ = work_buffer(logits)

    def room(columns: Tensor) -> Tensor:
        return work[:, : columns.shape[1]].contiguous()

    statistics = torch.stack([share.statistics(columns, labels, room(columns)) for share, columns in shares])
    for (share, columns), own in zip(shares, statistics, strict=True):
        found, factor = share.combine(statistics)
        share.differentiate(columns, own, labels, factor, upstream, room(columns))
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([columns for _, columns in shares], -1), gradient, rtol=1e-12, atol=1e-11)


def _smoothing_over_the_part(context: ParallelContext, cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    """A known mistake: the mean of label smoothing over the columns of the rank."""
    combine = TokenLoss.combine

    def broken(self: TokenLoss, statistics: Tensor) -> tuple[Tensor, Tensor]:
        index = 0 if self.group is None else self.group.index
        statistics = statistics.clone()
        statistics[:, 3] = statistics[index, 3] / self.real * self.vocab_size / statistics.shape[0]
        return combine(self, statistics)

    TokenLoss.combine = broken  # type: ignore[method-assign]
    return _compute(context, cases)


def _label_counted_by_all(context: ParallelContext, cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    """Each rank takes the label for its own, at the column nearest to it."""
    column = TokenLoss._column
    TokenLoss._column = lambda self, labels: (column(self, labels)[0], None)  # type: ignore[method-assign]
    return _compute(context, cases)


def _without_exchange(context: ParallelContext, cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    TokenLoss.start_exchange = lambda self, local: torch.stack([local, local])  # type: ignore[method-assign]
    return _compute(context, cases)


@pytest.mark.parametrize("mutant", [_smoothing_over_the_part, _label_counted_by_all, _without_exchange])
def test_a_broken_loss_is_caught(mutant: Any) -> None:
    case = Case(101, 128, label_smoothing=0.1)
    of_ranks = run_ranks(mutant, 2, [case], layout=ParallelLayout(tp=2), dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_right(case, [results[0] for results in of_ranks])
