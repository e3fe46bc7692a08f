"""Split layers compute what torch's whole ones do, in fp64: outputs and all gradients, whoever holds which part.

The ranks of one call of `run_ranks` go through all cases; the parent, which never initialises torch.distributed,
computes the whole and compares. Each rank draws its own upstream gradient where its output is its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megalite.launch.context import CPU, ParallelContext
from megalite.layout.parameters import Shard, Split, shard_of
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TpContext, VocabParallelEmbedding
from tests.layout.shards import cut
from tests.ranks import run_ranks

INPUTS = 8
SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """One layer and one input [*lead, inputs]."""

    outputs: tuple[int, ...]
    split: Split = Split(0)  # noqa: RUF009 (frozen)
    lead: tuple[int, ...] = (4, 3)
    sequence: bool = False
    with_main_grad: bool = False
    bias: bool = True
    strided: bool = False


@dataclass
class Outcome:
    """What a rank got: y, and gradients."""

    y: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def strided(x: Tensor, case: Case) -> Tensor:
    """The same values; with `case.strided` in memory that is not contiguous."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if case.strided else x.contiguous()


def part(x: Tensor, size: int, index: int, dim: int = 0) -> Tensor:
    return x.chunk(size, dim)[index]


def shards(case: Case, size: int, *trailing: int) -> list[Shard]:
    return [shard_of((*case.outputs, *trailing), case.split, size, index) for index in range(size)]


def summed(case: Case, locals_: list[Tensor], *trailing: int) -> Tensor:
    """The logical [*outputs, *trailing] to which each rank adds what it holds."""
    total = torch.zeros(*case.outputs, *trailing, dtype=torch.float64)
    for held, local in zip(shards(case, len(locals_), *trailing), locals_, strict=True):
        for box in held.boxes:
            total[box.logical] += local.view(held.shape)[box.local]
    return total


def outputs_first(x: Tensor) -> Tensor:
    """[*lead, n] -> [n, prod(lead)]"""
    return x.flatten(0, -2).t()


def local_upstream(case: Case, size: int, index: int) -> Tensor:
    """Gradient of a rank's own columns: [*lead, prod(local outputs)]"""
    return drawn(10 + index, *case.lead, prod(shards(case, size)[index].shape))


def finished(layer: Any, case: Case, x: Tensor, upstream: Tensor) -> Outcome:
    """Forward and backward of the layer, whose main gradient starts at ones."""
    if case.with_main_grad:
        layer.main_grad = torch.ones_like(layer.weight)
    x = strided(x, case).detach().requires_grad_()
    y = layer(x)
    y.backward(strided(upstream, case))
    assert (layer.weight.grad is None) == case.with_main_grad
    weight_grad = layer.main_grad - 1 if case.with_main_grad else layer.weight.grad
    bias_grad = None if layer.bias is None else layer.bias.grad
    return Outcome(y.detach(), x.grad, weight_grad, bias_grad)


def fill(layer: torch.nn.Module, **values: Tensor) -> None:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(values[name])


def columns(context: ParallelContext, cases: list[Case]) -> list[Outcome]:
    group, size, index = TensorGroup.of(context.group("tp")), context.size("tp"), context.index("tp")
    outcomes = []
    for case in cases:
        place = TpContext(torch.float64, CPU, group, case.sequence)
        layer = ColumnParallelLinear(case.outputs, INPUTS, case.split, place, bias=case.bias)
        bias = cut(drawn(2, *case.outputs), shards(case, size)[index])
        fill(layer, weight=cut(drawn(1, *case.outputs, INPUTS), shards(case, size, INPUTS)[index]), bias=bias)
        x = drawn(3, *case.lead, INPUTS)
        upstream = local_upstream(case, size, index)
        outcomes.append(finished(layer, case, part(x, size, index) if case.sequence else x, upstream))
    return outcomes


def check_columns(case: Case, outcomes: list[Outcome]) -> None:
    """Against torch's linear of the whole weight."""
    size, n, tokens = len(outcomes), prod(case.outputs), prod(case.lead)
    x = drawn(3, *case.lead, INPUTS).requires_grad_()
    weight, bias = drawn(1, n, INPUTS).requires_grad_(), drawn(2, n).requires_grad_()
    y = F.linear(x, weight, bias if case.bias else None)
    ups = [outputs_first(local_upstream(case, size, index)) for index in range(size)]
    y.backward(summed(case, ups, tokens).view(n, tokens).t().view_as(y))
    for index, outcome in enumerate(outcomes):
        held = cut(outputs_first(y.detach()).reshape(*case.outputs, tokens), shards(case, size, tokens)[index])
        same(outputs_first(outcome.y), held.flatten(0, -2))
        same(outcome.x, part(x.grad, size, index) if case.sequence else x.grad)
    same(summed(case, [outcome.weight for outcome in outcomes], INPUTS), weight.grad.view(*case.outputs, INPUTS))
    if case.bias:
        same(summed(case, [outcome.bias for outcome in outcomes]), bias.grad.view(case.outputs))


def rows(context: ParallelContext, cases: list[Case]) -> list[Outcome]:
    group, size, index = TensorGroup.of(context.group("tp")), context.size("tp"), context.index("tp")
    outcomes = []
    for case in cases:
        (n,) = case.outputs
        layer = RowParallelLinear(n, INPUTS, TpContext(torch.float64, CPU, group, case.sequence), bias=case.bias)
        fill(layer, weight=part(drawn(1, n, INPUTS), size, index, 1), bias=drawn(2, n))
        x, upstream = drawn(3, *case.lead, INPUTS), drawn(9, *case.lead, n)
        upstream = part(upstream, size, index) if case.sequence else upstream
        outcomes.append(finished(layer, case, part(x, size, index, -1), upstream))
    return outcomes


def check_rows(case: Case, outcomes: list[Outcome]) -> None:
    """Against torch's linear of the whole weight."""
    size, (n,) = len(outcomes), case.outputs
    x = drawn(3, *case.lead, INPUTS).requires_grad_()
    weight, bias = drawn(1, n, INPUTS).requires_grad_(), drawn(2, n).requires_grad_()
    y = F.linear(x, weight, bias if case.bias else None)
    y.backward(drawn(9, *case.lead, n))
    for index, outcome in enumerate(outcomes):
        same(outcome.y, part(y.detach(), size, index) if case.sequence else y.detach())
        same(outcome.x, part(x.grad, size, index, -1))
        same(outcome.weight, part(weight.grad, size, index, 1))
        if case.bias and not case.sequence:
            same(outcome.bias, bias.grad)
    if case.bias and case.sequence:
        same(sum(outcome.bias for outcome in outcomes), bias.grad)


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def check(ranks: Callable, checked: Callable, size: int, cases: list[Case]) -> None:
    by_rank = run_ranks(ranks, size, cases, dtype=torch.float64, layout=ParallelLayout(tp=size))
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        try:
            checked(case, outcomes)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


SWITCHES = [{"sequence": a, "with_main_grad": b} for a, b in product((False, True), repeat=2)]
COLUMNS = [
    *(Case((12,), **switches) for switches in SWITCHES),
    *(Case((2, 12), Split(1), **switches) for switches in SWITCHES),  # gate and up
    *(Case((2, 4 + 2, 3), Split(0, replicated=2), **switches) for switches in SWITCHES),  # at tp 4 replicated kv heads
    *(Case((10,), Split(0, uneven=True), **switches) for switches in SWITCHES),
    *(Case((12,), lead=lead) for lead in ((5, 3), (7,), (3, 1, 5))),
    *(Case((12,), lead=lead, sequence=True) for lead in ((8,), (4, 1, 5))),
    *(
        Case((12,), strided=True, sequence=sequence, with_main_grad=with_main_grad)
        for sequence, with_main_grad in product((False, True), repeat=2)
    ),
    Case((12,), bias=False),
]
ROWS = [
    *(Case((6,), **switches) for switches in SWITCHES),
    *(Case((5,), lead=lead) for lead in ((5, 3), (7,), (3, 1, 5))),
    *(Case((5,), lead=lead, sequence=True) for lead in ((8,), (4, 1, 5))),
    *(
        Case((6,), strided=True, sequence=sequence, with_main_grad=with_main_grad)
        for sequence, with_main_grad in product((False, True), repeat=2)
    ),
    Case((6,), bias=False),
]


@pytest.mark.parametrize("size", SIZES)
def test_a_column_parallel_linear_is_the_whole_linear(size: int) -> None:
    check(columns, check_columns, size, COLUMNS)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_parallel_linear_is_the_whole_linear(size: int) -> None:
    check(rows, check_rows, size, ROWS)


@dataclass(frozen=True)
class Lookup:
    """Tokens [s, b] into a table of `rows`."""

    rows: int
    sequence: bool
    with_main_grad: bool


def tokens_of(case: Lookup) -> Tensor:
    """[8, 3], every row and repeated ones; a transpose, as the model's are."""
    return torch.randint(case.rows, (3, 8), generator=torch.Generator().manual_seed(5)).t()


def embeddings(context: ParallelContext, cases: list[Lookup]) -> list[tuple[Tensor, Tensor]]:
    group, size, index = TensorGroup.of(context.group("tp")), context.size("tp"), context.index("tp")
    outcomes = []
    for case in cases:
        table = VocabParallelEmbedding(case.rows, 4, TpContext(torch.float64, CPU, group, case.sequence))
        fill(table, weight=cut(drawn(1, case.rows, 4), shard_of((case.rows, 4), Split(0, uneven=True), size, index)))
        if case.with_main_grad:
            table.main_grad = torch.ones_like(table.weight)
        y = table(tokens_of(case))
        y.backward(part(drawn(9, 8, 3, 4), size, index) if case.sequence else drawn(9, 8, 3, 4))
        assert (table.weight.grad is None) == case.with_main_grad
        outcomes.append((y.detach(), table.main_grad - 1 if case.with_main_grad else table.weight.grad))
    return outcomes


@pytest.mark.parametrize("size", SIZES)
def test_a_vocabulary_parallel_embedding_is_the_whole_table(size: int) -> None:
    cases = [Lookup(*case) for case in product((10, 16), (False, True), (False, True))]
    by_rank = run_ranks(embeddings, size, cases, dtype=torch.float64, layout=ParallelLayout(tp=size))
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        weight = drawn(1, case.rows, 4).requires_grad_()
        y = F.embedding(tokens_of(case), weight)
        y.backward(drawn(9, 8, 3, 4))
        for index, (got, _) in enumerate(outcomes):
            assert torch.equal(got, part(y.detach(), size, index) if case.sequence else y.detach()), case
        same(torch.cat([grad for _, grad in outcomes]), weight.grad)


def test_ranks_hold_uneven_rows_and_their_own_share_of_shared_groups() -> None:
    places = [TpContext(torch.float64, CPU, TensorGroup("tp", 4, index)) for index in range(4)]
    tables = [VocabParallelEmbedding(10, 4, place) for place in places]
    assert [(table.first_row, len(table.weight)) for table in tables] == [(0, 2), (2, 3), (5, 2), (7, 3)]
    qkv = ColumnParallelLinear((2, 6, 3), 8, Split(0, replicated=2), places[1], bias=True)
    assert (qkv.weight.shape, qkv.bias.shape, qkv.local_outputs) == ((1, 4, 3, 8), (1, 4, 3), (1, 4, 3))


def test_one_rank_is_the_plain_torch_path() -> None:
    alone = TpContext(torch.float64, CPU, None, True)
    x = torch.ones(4, 2, 8, dtype=torch.float64)
    table, tokens = VocabParallelEmbedding(10, 8, alone), torch.zeros(4, 2, dtype=torch.int64)
    column = ColumnParallelLinear((2, 3), 8, Split(1), alone, bias=True)
    row = RowParallelLinear(6, 8, alone, bias=True)
    for y in (column(x), row(x), table(tokens)):
        assert not [node for node in graph(y) if isinstance(node, BackwardCFunction)]
    assert [node.name() for node in graph(row(x))] == [node.name() for node in graph(torch.nn.Linear(8, 6).double()(x))]


def graph(y: Tensor) -> list[Any]:
    """The autograd nodes of y, leaves included."""
    nodes, front = [], [y.grad_fn]
    while front:
        node = front.pop()
        if node is not None:
            nodes.append(node)
            front.extend(following for following, _ in node.next_functions)
    return nodes


def test_a_with_main_grad_embedding_adds_repeated_tokens_in_wide_precision_to_what_is_there() -> None:
    table = VocabParallelEmbedding(10, 4, TpContext(torch.bfloat16, CPU))
    torch.nn.init.zeros_(table.weight)
    table.main_grad = torch.full((10, 4), 0.5)
    upstream = torch.tensor([[256.0, 1.0], [1.0, 2.0]], dtype=torch.bfloat16)  # in bf16 256 + 1 + 1 is 256
    table(torch.tensor([[3, 3], [3, 9]])).backward(upstream.unsqueeze(-1).expand(2, 2, 4))
    assert table.weight.grad is None
    assert table.main_grad[:, 0].tolist() == [0.5, 0.5, 0.5, 258.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2.5]
