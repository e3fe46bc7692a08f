"""The head and its loss on one process or on the ranks of a vocabulary, and what torch makes of the same numbers."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.products import statistics_dtype
from megalite.model.loss import TokenLoss, linear_cross_entropy
from megalite.tensor_parallel.collectives import TensorGroup


@dataclass(frozen=True)
class Case:
    """Tokens 0 and 1 have the first and the last label of the vocabulary; the mask is ragged, or masks everything."""

    vocab: int = 101
    padded: int = 128
    chunk: int | None = 16
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    sequence_parallel: bool = False
    main_grad: bool = False
    masked: bool = False
    n: int = 48
    width: int = 24
    spread: float = 1.0
    scale: float = 0.37
    dtype: torch.dtype = torch.float64
    compile: bool = False

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden, weight, labels and loss mask: of everything."""
        generator = torch.Generator().manual_seed(self.padded)
        hidden = torch.randn(self.n, self.width, generator=generator, dtype=torch.float64).to(self.dtype)
        weight = torch.randn(self.padded, self.width, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, self.vocab, (self.n,), generator=generator)
        labels[:2] = torch.tensor([0, self.vocab - 1])
        mask = torch.rand(self.n, generator=generator) < (0.0 if self.masked else 0.7)
        mask[:2] = not self.masked
        return hidden, (self.spread * weight).to(self.dtype), labels, mask

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients of hidden and weight, in fp64 by torch, of all logits at once."""
        hidden, weight, labels, mask = self.inputs()
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        logits = hidden @ weight[: self.vocab].t()
        losses = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing, reduction="none")
        losses = losses + self.z_loss * logits.logsumexp(-1).square()
        loss = self.scale * losses[mask].sum()
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


class Head:
    """What one rank of `group` holds of a case; its main gradient starts at twos."""

    def __init__(self, case: Case, group: TensorGroup | None = None, device: str = "cpu") -> None:
        index, size = (0, 1) if group is None else (group.index, group.size)
        hidden, weight, self.labels, self.mask = (tensor.to(device) for tensor in case.inputs())
        if case.sequence_parallel:
            hidden = hidden[index * case.n // size : (index + 1) * case.n // size]
        weight = weight[index * case.padded // size : (index + 1) * case.padded // size]
        self.case, self.scale = case, torch.tensor(case.scale, dtype=torch.float64, device=device)
        self.hidden, self.weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        settings = case.vocab, case.label_smoothing, case.z_loss
        self.token_loss = TokenLoss(case.padded, group, *settings)
        self.main_grad: Tensor | None = None
        if case.main_grad:
            self.main_grad = torch.full(weight.shape, 2.0, dtype=statistics_dtype(case.dtype), device=device)

    def loss(self, **options: Any) -> Tensor:
        """`options` are those of `linear_cross_entropy`, by default the case's."""
        case = self.case
        usual = {"chunk_tokens": case.chunk, "sequence_parallel": case.sequence_parallel, "compile": case.compile}
        given = self.hidden, self.weight, self.labels, self.mask, self.scale, self.token_loss
        return linear_cross_entropy(*given, **{**usual, "main_grad": self.main_grad, **options})


@dataclass(frozen=True)
class Result:
    """Of one rank: the loss, as trained and as evaluated, and its gradients."""

    loss: Tensor
    evaluated: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def compute(case: Case, group: TensorGroup | None = None, device: str = "cpu") -> Result:
    head = Head(case, group, device)
    with torch.no_grad():
        evaluated = head.loss()
    assert head.main_grad is None or bool((head.main_grad == 2.0).all())
    trained = head.loss()
    trained.backward()
    assert head.hidden.grad is not None
    assert (head.weight.grad is None) == case.main_grad
    weight_grad = head.weight.grad if head.main_grad is None else head.main_grad - 2.0
    assert weight_grad is not None
    return Result(trained.detach().cpu(), evaluated.cpu(), head.hidden.grad.cpu(), weight_grad.cpu())


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.detach().double() - reference).abs().max() / reference.abs().max())


def assert_right(case: Case, of_ranks: list[Result], loss_bound: float = 1e-12, bound: float = 1e-12) -> None:
    """Within these bounds of torch, relative to the largest number."""
    loss, hidden_grad, weight_grad = case.expected()
    for found in of_ranks:
        assert found.loss.dtype == statistics_dtype(case.dtype)
        assert torch.equal(found.loss, of_ranks[0].loss), "the same bits on every rank"
        assert relative_error(found.evaluated, found.loss) <= (1e-6 if case.compile else 0) or case.masked
    found_weight = torch.cat([found.weight_grad for found in of_ranks])
    if case.sequence_parallel:
        found_hidden = torch.cat([found.hidden_grad for found in of_ranks])
    else:
        found_hidden = of_ranks[0].hidden_grad
        assert all(torch.equal(found.hidden_grad, found_hidden) for found in of_ranks)
    assert torch.count_nonzero(found_weight[case.vocab :]) == 0
    if case.masked:
        assert torch.count_nonzero(found_weight) == torch.count_nonzero(found_hidden) == of_ranks[0].loss == 0
        return
    assert relative_error(of_ranks[0].loss, loss) < loss_bound
    assert relative_error(found_hidden, hidden_grad) < bound
    assert relative_error(found_weight, weight_grad) < bound
