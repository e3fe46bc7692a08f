"""Each mapping does what its name says, and its gradient is the adjoint, over all ranks, of what it does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel import mappings
from megalite.tensor_parallel.collectives import TensorGroup
from tests.ranks import run_ranks

Ranks = list[Tensor]  # one tensor per rank
Mapping = Callable[[Tensor, TensorGroup | None], Tensor]
SHAPES = [(4, 3, 8), (8, 1, 4), (4, 4)]  # [s, b, h] before it is split, and without a batch dim

DEFINITIONS: dict[str, Callable[[Ranks], Ranks]] = {  # every rank's output from every rank's input
    "reduce_from_tensor_parallel": lambda xs: [torch.stack(xs).sum(0)] * len(xs),
    "gather_from_sequence_parallel": lambda xs: [torch.cat(xs)] * len(xs),
    "reduce_scatter_to_sequence_parallel": lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs))),
    "gather_for_terms": lambda xs: [torch.cat(xs)] * len(xs),
}
REPLICATED = ("reduce_from_tensor_parallel", "gather_from_sequence_parallel")  # outputs: one, whose gradient is alike


def mapping(name: str) -> Mapping:
    return getattr(mappings, name)  # type: ignore[no-any-return]


def drawn(name: str, shape: tuple[int, ...], size: int) -> tuple[Ranks, Ranks]:
    """Every rank's input and output gradient, the same on whichever rank they are made."""
    gathers = name.startswith("gather")
    own = (shape[0] // size, *shape[1:]) if gathers else shape
    generators = [torch.Generator().manual_seed(index) for index in range(size)]
    xs = [torch.randn(own, generator=each, dtype=torch.float64) for each in generators]
    outputs = DEFINITIONS[name](xs)
    ys = [torch.randn(outputs[0].shape, generator=each, dtype=torch.float64) for each in generators]
    return xs, [ys[0]] * size if name in REPLICATED else ys


KINDS = [(name, shape) for name in DEFINITIONS for shape in SHAPES]


def evaluated(context: ParallelContext) -> list[tuple[Tensor, Tensor]]:
    """This rank's output and gradient of each mapping and shape."""
    group = TensorGroup.of(context.group("tp"))
    assert group is not None
    found = []
    for name, shape in KINDS:
        xs, ys = drawn(name, shape, group.size)
        x = xs[group.index].requires_grad_()
        output = mapping(name)(x, group)
        found.append((output.detach(), torch.autograd.grad(output, x, ys[group.index])[0]))
    return found


def check(size: int, function: Callable[[ParallelContext], list[tuple[Tensor, Tensor]]] = evaluated) -> None:
    by_rank = run_ranks(function, size, dtype=torch.float64, layout=ParallelLayout(tp=size))
    for (name, shape), *of_ranks in zip(KINDS, *by_rank, strict=True):
        xs, ys = drawn(name, shape, size)
        xs = [x.requires_grad_() for x in xs]
        outputs = DEFINITIONS[name](xs)
        counted = outputs[:1] if name in REPLICATED else outputs  # a replicated output is one
        expected = torch.autograd.grad(counted, xs, ys[: len(counted)])
        for (output, gradient), wanted, wanted_gradient in zip(of_ranks, outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted.detach(), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_are_those_of_the_definition_over_all_ranks(size: int) -> None:
    check(size)


def with_the_wrong_adjoint(context: ParallelContext) -> list[tuple[Tensor, Tensor]]:
    """Takes what the ranks compute with a gathered sequence for their own, where all compute the same."""
    mappings._split = mappings._reduce_scatter  # type: ignore[assignment]
    return evaluated(context)


def test_a_wrong_adjoint_is_caught() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check(2, with_the_wrong_adjoint)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_without_a_group_there_is_nothing_to_do(name: str) -> None:
    x = torch.randn(SHAPES[0])
    assert mapping(name)(x, None) is x
