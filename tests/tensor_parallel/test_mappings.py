"""Each mapping does what its name says, and its gradient is the adjoint, over all ranks, of what it does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel import mappings
from megalite.tensor_parallel.collectives import TensorGroup
from tests.ranks import run_ranks

Ranks = list[Tensor]  # one tensor per rank
SHAPES = [(4, 3, 8), (8, 1, 4), (4, 4)]  # [s, b, h] before it is split, and without a batch dim


@dataclass(frozen=True)
class Case:
    """A mapping with its definition: every rank's output from every rank's input, as plain torch."""

    name: str
    definition: Callable[[Ranks], Ranks]
    takes_replicated: bool = False
    gives_replicated: bool = False
    split_dim: int | None = None  # the dim of the input that starts split

    def apply(self, x: Tensor, group: TensorGroup | None) -> Tensor:
        return getattr(mappings, self.name)(x, group)  # type: ignore[no-any-return]

    def inputs(self, shape: tuple[int, ...], size: int) -> Ranks:
        """The input of each rank, the same on whichever rank it is made."""
        sizes = list(shape)
        if self.split_dim is not None:
            sizes[self.split_dim] //= size
        drawn = []
        for index in range(size):
            seed = 0 if self.takes_replicated else index
            drawn.append(torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        return drawn

    def output_gradients(self, outputs: Ranks) -> Ranks:
        drawn = []
        for index, output in enumerate(outputs):
            generator = torch.Generator().manual_seed(100 if self.gives_replicated else 100 + index)
            drawn.append(torch.randn(output.shape, generator=generator, dtype=torch.float64))
        return drawn


def replicated_sum(xs: Ranks) -> Ranks:
    return [sum(xs[1:], xs[0])] * len(xs)


def parts_of_whole(dim: int) -> Callable[[Ranks], Ranks]:
    return lambda xs: list(xs[0].chunk(len(xs), dim))


def whole_of_parts(dim: int) -> Callable[[Ranks], Ranks]:
    return lambda xs: [torch.cat(xs, dim)] * len(xs)


CASES = {
    case.name: case
    for case in [
        Case("reduce_from_tensor_parallel", replicated_sum, gives_replicated=True),
        Case("gather_from_sequence_parallel", whole_of_parts(0), gives_replicated=True, split_dim=0),
        Case("reduce_scatter_to_sequence_parallel", lambda xs: parts_of_whole(0)(replicated_sum(xs))),
    ]
}


def gather_uneven(x: Tensor, size: int) -> Ranks:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, x)
    return gathered


def scattered_in_memory(x: Tensor) -> Tensor:
    """The same values, in the reverse order of dims."""
    return x.mT.contiguous().mT if x.ndim == 2 else x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


class Global(torch.autograd.Function):
    """A mapping as one function of what all ranks hold, which every rank runs in lockstep with the same arguments.

    From all ranks' inputs, flat (a replicated one once), to all ranks' outputs, flat (a replicated one once).
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, case: Case, shapes: list[torch.Size], group: TensorGroup) -> Tensor:
        numels = [shape.numel() for shape in shapes]
        own = flat if case.takes_replicated else flat.split(numels)[group.index]
        x = own.detach().view(shapes[group.index]).requires_grad_()
        with torch.enable_grad():
            y = case.apply(x, group)
        outputs = gather_uneven(y.detach(), group.size)
        ctx.case, ctx.group, ctx.numels, ctx.x, ctx.y = case, group, [y.numel() for y in outputs], x, y
        return joined(outputs, case.gives_replicated)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        own = gradient if ctx.case.gives_replicated else gradient.split(ctx.numels)[ctx.group.index]
        (of_x,) = torch.autograd.grad(ctx.y, ctx.x, own.view(ctx.y.shape), retain_graph=True)
        return joined(gather_uneven(of_x, ctx.group.size), ctx.case.takes_replicated), None, None, None


def run_on_all_ranks(flat: Tensor, case: Case, shapes: list[torch.Size], group: TensorGroup) -> Tensor:
    return Global.apply(flat, case, shapes, group)  # type: ignore[no-any-return]


def joined(xs: Ranks, replicated: bool) -> Tensor:
    """All ranks' tensors, flat; of a replicated one, after a check that it is, one."""
    if not replicated:
        return torch.cat([x.flatten() for x in xs])
    for x in xs[1:]:
        torch.testing.assert_close(x, xs[0], rtol=1e-12, atol=1e-14)
    return xs[0].flatten().clone()


@dataclass(frozen=True)
class Answer:
    """What one rank got for a case and a shape."""

    output: Tensor
    gradient: Tensor  # of the input
    second: Tensor  # derivative of that gradient by the output's gradient, applied to the input


def evaluate(apply: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Answer:
    """Of a linear function; the second derivative is then the function itself."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    output = apply(x)
    (gradient,) = torch.autograd.grad(output, x, y, create_graph=True)
    (second,) = torch.autograd.grad(gradient, y, x.detach())
    return Answer(output.detach(), gradient.detach(), second)


def drawn(case: Case, shape: tuple[int, ...], size: int) -> tuple[Ranks, Ranks]:
    """Every rank's input and output gradient."""
    inputs = case.inputs(shape, size)
    return inputs, case.output_gradients(case.definition(inputs))


def evaluate_all(context: ParallelContext) -> dict[tuple[str, tuple[int, ...]], Answer]:
    group = TensorGroup.of(context.group("tp"))
    assert group is not None
    answers = {}
    for key, case in CASES.items():
        for shape in SHAPES:
            inputs, gradients = drawn(case, shape, group.size)
            x, y = inputs[group.index], gradients[group.index]
            answers[key, shape] = evaluate(partial(case.apply, group=group), x, y)
            check_odd_strides(case, group, x, y, answers[key, shape])
    return answers


def check_odd_strides(case: Case, group: TensorGroup, x: Tensor, y: Tensor, expected: Answer) -> None:
    odd = evaluate(partial(case.apply, group=group), scattered_in_memory(x), scattered_in_memory(y))
    assert torch.equal(odd.output, expected.output)
    assert torch.equal(odd.gradient, expected.gradient)
    leaf = x.detach().requires_grad_()
    output = case.apply(leaf, group)
    (expanded,) = torch.autograd.grad(output.sum(), leaf, retain_graph=True)  # a gradient whose strides are 0
    (ones,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
    assert torch.equal(expanded, ones)


@cache
def answers_of(size: int) -> list[dict[tuple[str, tuple[int, ...]], Answer]]:
    return run_ranks(evaluate_all, size, dtype=torch.float64, layout=ParallelLayout(tp=size))


def each_shape(key: str, size: int) -> Iterator[tuple[Ranks, Ranks, list[Answer]]]:
    for shape in SHAPES:
        yield *drawn(CASES[key], shape, size), [answers[key, shape] for answers in answers_of(size)]


def inner(xs: Ranks, ys: Ranks, replicated: bool) -> float:
    """The inner product over what all ranks hold, a replicated tensor counted once."""
    products = [float((x * y).sum()) for x, y in zip(xs, ys, strict=True)]
    return products[0] if replicated else sum(products)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("key", CASES)
def test_outputs_are_those_of_the_definition(key: str, size: int) -> None:
    for inputs, _, answers in each_shape(key, size):
        for answer, expected in zip(answers, CASES[key].definition(inputs), strict=True):
            torch.testing.assert_close(answer.output, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("key", CASES)
def test_the_gradient_is_the_adjoint_over_all_ranks(key: str, size: int) -> None:
    case = CASES[key]
    for inputs, gradients, answers in each_shape(key, size):
        forward = inner(gradients, [answer.output for answer in answers], case.gives_replicated)
        backward = inner([answer.gradient for answer in answers], inputs, case.takes_replicated)
        assert forward == pytest.approx(backward, rel=1e-12)
        if case.takes_replicated:
            joined([answer.gradient for answer in answers], replicated=True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("key", CASES)
def test_the_adjoint_of_the_adjoint_is_the_mapping(key: str, size: int) -> None:
    for _, _, answers in each_shape(key, size):
        for answer in answers:
            assert torch.equal(answer.second, answer.output)


def _gradcheck(context: ParallelContext, cases: list[str]) -> None:
    group = TensorGroup.of(context.group("tp"))
    assert group is not None
    for case in (CASES[key] for key in cases):
        inputs = case.inputs((4, 1, 4), group.size)
        flat = joined(inputs, case.takes_replicated).requires_grad_()
        function = partial(run_on_all_ranks, case=case, shapes=[x.shape for x in inputs], group=group)
        assert gradcheck(function, flat, fast_mode=group.size == 4)  # fast: random projections of the Jacobian


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_those_of_finite_differences_over_all_ranks(size: int) -> None:
    run_ranks(_gradcheck, size, list(CASES), dtype=torch.float64, layout=ParallelLayout(tp=size))


def _gradcheck_with_the_wrong_adjoint(context: ParallelContext) -> None:
    """Takes what the ranks compute with a gathered sequence for their own, where all compute the same."""
    mappings._split = mappings._reduce_scatter  # type: ignore[assignment]
    _gradcheck(context, ["gather_from_sequence_parallel"])


def test_a_wrong_adjoint_is_caught() -> None:
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        run_ranks(_gradcheck_with_the_wrong_adjoint, 2, dtype=torch.float64, layout=ParallelLayout(tp=2))


def _compiled_like_eager(context: ParallelContext) -> None:
    group = TensorGroup.of(context.group("tp"))
    assert group is not None

    def every_mapping(inputs: Ranks) -> Ranks:
        pairs = zip(CASES.values(), inputs, strict=True)
        return [torch.sin(case.apply(torch.cos(x), group)) for case, x in pairs]  # something to trace on either side

    compiled = torch.compile(every_mapping, fullgraph=True, backend="aot_eager")
    results = []
    for function in (every_mapping, compiled):
        inputs = [case.inputs(SHAPES[0], group.size)[group.index].requires_grad_() for case in CASES.values()]
        outputs = function(inputs)
        results.append((*outputs, *torch.autograd.grad([y.square().sum() for y in outputs], inputs)))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_compiled_into_one_graph_they_compute_the_same() -> None:
    run_ranks(_compiled_like_eager, 2, dtype=torch.float64, layout=ParallelLayout(tp=2))


@pytest.mark.parametrize("key", CASES)
def test_without_a_group_there_is_nothing_to_do(key: str) -> None:
    x = torch.randn(SHAPES[0])
    assert CASES[key].apply(x, None) is x
