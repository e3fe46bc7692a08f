"""Split layers compute what torch's whole ones do, in fp64: outputs and all gradients, whoever holds which part.

The ranks of one call of `run_ranks` go through all cases; the parent, which never initialises torch.distributed,
computes the whole and compares. Each rank draws its own upstream gradient where its output is its own.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from megalite.kernels.embed import main_grad_of
from megalite.launch.context import CPU, ParallelContext
from megalite.layout.parameters import Shard, Split, shard_of
from megalite.layout.ranks import ParallelLayout
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TpContext, VocabParallelEmbedding
from tests.layout.shards import cut
from tests.model.small import set_main_grads
from tests.ranks import run_ranks

INPUTS = 8
SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """A row- or column-parallel layer and one input [*lead, inputs]; `strided`: in memory that is not contiguous."""

    outputs: tuple[int, ...]
    split: Split = Split(0)  # noqa: RUF009 (frozen)
    lead: tuple[int, ...] = (4, 3)
    sequence: bool = False
    with_main_grad: bool = False
    bias: bool = True
    strided: bool = False
    row: bool = False

    def shards(self, size: int, *trailing: int) -> list[Shard]:
        """The ranks' shards of the logical [*outputs, *trailing]."""
        split = Split(1) if self.row else self.split
        return [shard_of((*self.outputs, *trailing), split, size, index) for index in range(size)]

    def logical(self) -> tuple[Tensor, Tensor, Tensor]:
        """x [*lead, inputs], weight [*outputs, inputs] and bias [*outputs]."""
        return drawn(3, *self.lead, INPUTS), drawn(1, *self.outputs, INPUTS), drawn(2, *self.outputs)

    def input_of(self, x: Tensor, size: int, index: int) -> Tensor:
        """A rank's part of x, or of its gradient."""
        return part(x, size, index, -1) if self.row else part(x, size, index) if self.sequence else x

    def upstream_of(self, size: int, index: int) -> Tensor:
        """The gradient of a rank's output."""
        if not self.row:
            return drawn(10 + index, *self.lead, prod(self.shards(size)[index].shape))
        whole = drawn(9, *self.lead, *self.outputs)
        return part(whole, size, index) if self.sequence else whole


class Outcome(NamedTuple):
    """What a rank got: y, and gradients."""

    y: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def part(x: Tensor, size: int, index: int, dim: int = 0) -> Tensor:
    return x.chunk(size, dim)[index]


def in_memory(x: Tensor, case: Case) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if case.strided else x.contiguous()


def outputs_first(x: Tensor) -> Tensor:
    """[*lead, n] -> [n, prod(lead)]"""
    return x.flatten(0, -2).t()


def summed(shards: list[Shard], shape: tuple[int, ...], locals_: list[Tensor]) -> Tensor:
    """The logical tensor to which each rank adds what it holds."""
    total = torch.zeros(shape, dtype=torch.float64)
    for held, local in zip(shards, locals_, strict=True):
        for box in held.boxes:
            total[box.logical] += local.view(held.shape)[box.local]
    return total


def on_a_rank(context: ParallelContext, cases: list[Case]) -> list[Outcome]:
    """Forward and backward of each case's layer, whose main gradient starts at ones."""
    group, size, index = TensorGroup.of(context.group("tp")), context.size("tp"), context.index("tp")
    outcomes = []
    for case in cases:
        place = TpContext(torch.float64, CPU, group, group if case.sequence else None)
        layer: Any = (
            RowParallelLinear(*case.outputs, INPUTS, place, bias=case.bias)
            if case.row
            else ColumnParallelLinear(case.outputs, INPUTS, case.split, place, bias=case.bias)
        )
        x, weight, bias = case.logical()
        layer.weight.data.copy_(cut(weight, case.shards(size, INPUTS)[index]))
        if case.bias:
            layer.bias.data.copy_(bias if case.row else cut(bias, case.shards(size)[index]))
        if case.with_main_grad:
            set_main_grads(layer, {"weight": torch.ones_like(layer.weight, requires_grad=False)})
        x = in_memory(case.input_of(x, size, index), case).requires_grad_()
        y = layer(x)
        y.backward(in_memory(case.upstream_of(size, index), case))
        assert (layer.weight.grad is None) == case.with_main_grad
        weight_grad = main_grad_of(layer.weight).view_as(layer.weight) - 1 if case.with_main_grad else layer.weight.grad
        outcomes.append(Outcome(y.detach(), x.grad, weight_grad, layer.bias.grad if case.bias else None))
    return outcomes


def check(case: Case, outcomes: list[Outcome]) -> None:
    """Against torch's linear of the whole weight."""
    size, n, tokens = len(outcomes), prod(case.outputs), prod(case.lead)
    x, weight, bias = (tensor.requires_grad_() for tensor in case.logical())
    y = F.linear(x, weight.flatten(0, -2), bias.flatten() if case.bias else None)
    by_output, shards = (*case.outputs, tokens), None if case.row else case.shards(size, tokens)
    if shards is None:
        y.backward(drawn(9, *case.lead, n))
    else:
        upstream = [outputs_first(case.upstream_of(size, index)) for index in range(size)]
        y.backward(summed(shards, by_output, upstream).view(n, tokens).t().view_as(y))
    for index, outcome in enumerate(outcomes):
        if shards is None:
            same(outcome.y, part(y.detach(), size, index) if case.sequence else y.detach())
        else:
            held = cut(outputs_first(y.detach()).reshape(by_output), shards[index])
            same(outputs_first(outcome.y), held.flatten(0, -2))
        same(outcome.x, case.input_of(x.grad, size, index))
    weights = [outcome.weight for outcome in outcomes]
    same(summed(case.shards(size, INPUTS), weight.shape, weights), weight.grad)
    biases = [outcome.bias for outcome in outcomes if outcome.bias is not None]
    if not case.bias:
        return
    if case.row and not case.sequence:  # each rank has all of it
        assert all(torch.equal(one, biases[0]) for one in biases)
        same(biases[0], bias.grad)
    else:
        same(sum(biases) if case.row else summed(case.shards(size), bias.shape, biases), bias.grad)


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


SWITCHES: list[dict[str, Any]] = [{"sequence": a, "with_main_grad": b} for a, b in product((False, True), repeat=2)]
COLUMNS = [
    *(Case((12,), **switches) for switches in SWITCHES),
    *(Case((2, 12), Split(1), **switches) for switches in SWITCHES),  # gate and up
    *(Case((2, 4 + 2, 3), Split(0, replicated=2), **switches) for switches in SWITCHES),  # at tp 4 replicated kv heads
    *(Case((10,), Split(0, uneven=True), **switches) for switches in SWITCHES),
]
EITHER = [
    *(Case((12,), row=row, lead=lead) for row in (False, True) for lead in ((5, 3), (7,), (3, 1, 5))),
    *(Case((12,), row=row, lead=lead, sequence=True) for row in (False, True) for lead in ((8,), (4, 1, 5))),
    *(Case((12,), row=row, strided=True, **switches) for row in (False, True) for switches in SWITCHES),
    *(Case((12,), row=row, bias=False) for row in (False, True)),
]
ROWS = [Case((6,), row=True, **switches) for switches in SWITCHES]


@pytest.mark.parametrize("size", SIZES)
def test_a_split_linear_is_the_whole_linear(size: int) -> None:
    cases = [*COLUMNS, *EITHER, *ROWS]
    by_rank = run_ranks(on_a_rank, size, cases, dtype=torch.float64, layout=ParallelLayout(tp=size))
    for case, *outcomes in zip(cases, *by_rank, strict=True):
        try:
            check(case, outcomes)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


class Lookup(NamedTuple):
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
        table = VocabParallelEmbedding(
            case.rows, 4, TpContext(torch.float64, CPU, group, group if case.sequence else None)
        )
        held = shard_of((case.rows, 4), Split(0, uneven=True), size, index)
        table.weight.data.copy_(cut(drawn(1, case.rows, 4), held))
        if case.with_main_grad:
            set_main_grads(table, {"weight": torch.ones_like(table.weight, requires_grad=False)})
        y = table(tokens_of(case))
        y.backward(part(drawn(9, 8, 3, 4), size, index) if case.sequence else drawn(9, 8, 3, 4))
        assert (table.weight.grad is None) == case.with_main_grad
        main_grad = main_grad_of(table.weight)
        outcomes.append((y.detach(), table.weight.grad if main_grad is None else main_grad - 1))
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
    alone = TpContext(torch.float64, CPU)
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
