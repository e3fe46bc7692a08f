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

from megalite.parallel.context import ParallelContext
from megalite.parallel.layout import ParallelLayout
from megalite.tensor_parallel import cross_entropy
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.cross_entropy import TokenLoss, softmax, vocab_parallel_cross_entropy, work_buffers
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


def losses_and_gradient(case: Case, group: TensorGroup | None) -> tuple[Tensor, Tensor]:
    """Of this rank; its logits are a view of a larger tensor that must stay as it was."""
    everything, labels, upstream = case.inputs()
    given = everything.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(
        given[..., part(case, group)],
        labels,
        vocab_size=case.vocab,
        group=group,
        padded_vocab=case.padded,
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
    )
    losses.backward(upstream.to(losses.dtype))
    assert torch.equal(given, everything), "the caller's logits are only read"
    assert given.grad is not None
    return losses.detach(), given.grad[..., part(case, group)].clone()


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_equals_torch(case: Case) -> None:
    assert_right(case, [losses_and_gradient(case, None)])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_equal_torch(size: int) -> None:
    of_ranks = run_ranks(_compute, size, CASES, layout=ParallelLayout(tp=size), dtype=torch.float64)
    for case, *results in zip(CASES, *of_ranks, strict=True):
        assert_right(case, results)


def test_low_precision_has_fp32_statistics() -> None:
    """4,000 equal terms: a bf16 sum stops growing at 256."""
    tolerances = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    cases = [Case(4000, 4096, 0.1, 1e-3, spread=0.5, dtype=dtype) for dtype in tolerances]
    of_ranks = run_ranks(_compute, 2, cases, layout=ParallelLayout(tp=2))
    for case, tolerance, *results in zip(cases, tolerances.values(), *of_ranks, strict=True):
        assert all(losses.dtype == torch.float32 and grad.dtype == case.dtype for losses, grad in results)
        torch.testing.assert_close(results[0][0].double(), case.expected()[0], rtol=2e-6, atol=0)
        assert_right(case, results, tolerance)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(40, 48, 0.1, 1e-3)
    whole = losses_and_gradient(case, None)
    monkeypatch.setitem(cross_entropy.PIECE_ELEMENTS, "cpu", 4 * 40)  # 4 of 15 tokens at a time
    assert all(torch.equal(*pair) for pair in zip(losses_and_gradient(case, None), whole, strict=True))


def test_gradient_is_that_of_finite_differences() -> None:
    case = Case(6, 8, label_smoothing=0.2, z_loss=0.3, shape=(4,))
    logits, labels, _ = case.inputs()

    def losses(logits: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels, vocab_size=6, group=None, label_smoothing=0.2, z_loss=0.3)

    assert torch.autograd.gradcheck(losses, logits.requires_grad_())


def test_a_logit_of_minus_infinity_is_a_column_without_probability() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([2]), vocab_size=3, group=None)
    loss.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(loss, torch.tensor([math.log(2)], dtype=torch.float64))
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, 0.0, -0.5]], dtype=torch.float64))


def test_not_a_number_stays_visible() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 3] = torch.nan
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([0, 0]), vocab_size=4, group=None)
    assert losses.isnan().tolist() == [True, False]


def _gathered(context: ParallelContext, case: Case) -> Tensor:
    """Every rank passes all logits, as after a gather, and still names the group."""
    logits, labels, _ = case.inputs()
    group = TensorGroup.of(context.group("tp"))
    with pytest.raises(AssertionError):  # rows that cannot be this rank's
        vocab_parallel_cross_entropy(logits, labels, vocab_size=case.vocab, group=group, padded_vocab=case.padded)
    return vocab_parallel_cross_entropy(logits, labels, vocab_size=case.vocab, group=group)


def test_gathered_logits_do_not_count_the_vocabulary_once_per_rank() -> None:
    """The known mistake adds log(t) to the loss of every token."""
    case = Case(40, 48)
    for losses in run_ranks(_gathered, 2, case, layout=ParallelLayout(tp=2), dtype=torch.float64):
        torch.testing.assert_close(losses, case.expected()[0], rtol=1e-12, atol=0)


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
        options: dict[str, Any] = {"vocab_size": vocab, "label_smoothing": label_smoothing, "z_loss": 1e-2}
        share = TokenLoss.of(columns.shape[1], case.padded, group, **options)
        columns[:, share.real :] = -torch.inf
        shares.append((share, columns))
    work, _ = work_buffers(logits)

    def local(columns: Tensor) -> tuple[Tensor, Tensor]:
        return softmax(columns, work[:, :, : columns.shape[1]].contiguous())

    statistics = torch.stack([share.local_statistics(*local(columns), labels) for share, columns in shares])
    for share, columns in shares:
        found, factor = share.combine(statistics)
        share.write_gradient(columns, local(columns)[1], labels, factor, upstream)
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
