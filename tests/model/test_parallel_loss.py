"""The chunked head and loss of a vocabulary that ranks share: torch's numbers and the order of work."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model import loss as loss_module
from megalite.model.loss import PIECE_ELEMENTS, TokenLoss
from megalite.tensor_parallel.collectives import TensorGroup
from tests.model.losses import Case, Head, Result, assert_right, compute
from tests.ranks import run_ranks
from tests.tensor_parallel.operations import Operations

CASES = [
    Case(),
    Case(sequence_parallel=True),
    Case(label_smoothing=0.1, z_loss=1e-2, sequence_parallel=True, main_grad=True),
    Case(label_smoothing=0.1, chunk=7),
    Case(z_loss=1e-2, chunk=48, main_grad=True),
    Case(chunk=1, label_smoothing=0.3, sequence_parallel=True),
    Case(chunk=None, sequence_parallel=True),
    Case(chunk=480),
    Case(vocab=7, padded=10, label_smoothing=0.3),  # over 4: the last rank has padding alone
    Case(vocab=7, padded=10, label_smoothing=0.3, z_loss=1e-2, sequence_parallel=True, main_grad=True),
    Case(vocab=2, padded=2, chunk=5),  # over 3 and 4: some rank has no row at all
    Case(vocab=100, padded=100, n=12, width=5, chunk=11, sequence_parallel=True),
    Case(masked=True, label_smoothing=0.1, z_loss=1e-2),
    Case(masked=True, sequence_parallel=True),
    Case(spread=1e4, label_smoothing=0.1, sequence_parallel=True),  # probabilities that are zero in every format
    Case(spread=1e-9, label_smoothing=0.1, z_loss=1e-2),
]


def _compute(context: ParallelContext, cases: list[Case]) -> list[Result]:
    group = TensorGroup.of(context.group("tp"))
    return [compute(case, group) for case in cases]


@pytest.mark.parametrize("case", [replace(case, sequence_parallel=False) for case in CASES], ids=str)
def test_one_process_equals_torch(case: Case) -> None:
    assert_right(case, [compute(case)])


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_equal_torch(size: int) -> None:
    of_ranks = run_ranks(_compute, size, CASES, layout=ParallelLayout(tp=size), dtype=torch.float64)
    for case, *results in zip(CASES, *of_ranks, strict=True):
        assert_right(case, results)


def test_bf16_keeps_fp32_statistics_over_ranks() -> None:
    wide = Case(4000, 4096, n=300, width=64, spread=0.1, dtype=torch.bfloat16, label_smoothing=0.1)
    cases = [replace(wide, sequence_parallel=parallel) for parallel in (False, True)]
    for case, *results in zip(cases, *run_ranks(_compute, 2, cases, layout=ParallelLayout(tp=2)), strict=True):
        assert_right(case, results, 1e-4, 2**-6)


def _compute_compiled(context: ParallelContext, cases: list[Case], backend: str) -> tuple[list[Result], int]:
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend=backend)
    return _compute(context, cases), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("count", "backend"), [(1, "aot_eager"), pytest.param(3, "inductor", marks=pytest.mark.long)])
def test_compiled_ranks_equal_torch(count: int, backend: str) -> None:
    """One chunk, two of 24 tokens, and a case whose second rank has padding alone. A plain run compiles to the graphs;
    the code that is made of such graphs is test_loss.py's."""
    shaped = Case(label_smoothing=0.1, z_loss=1e-2, chunk=None, sequence_parallel=True, main_grad=True, compile=True)
    alone = replace(shaped, vocab=5, padded=16, sequence_parallel=False)
    cases = [replace(shaped, vocab=11, padded=16), replace(shaped, chunk=24, label_smoothing=0.0), alone][:count]
    layout = ParallelLayout(tp=2)
    of_ranks = run_ranks(_compute_compiled, 2, cases, backend, layout=layout, dtype=torch.float64, timeout=300)
    # Statistics and gradients of each case, but of padding.
    assert [graphs for _, graphs in of_ranks] == ([2, 2] if count == 1 else [6, 4])
    for case, *results in zip(cases, *(results for results, _ in of_ranks), strict=True):
        assert_right(case, results)


NAMES = {
    "mm": "product",
    "addmm_": "weight",
    "all_gather_into_tensor_out": "gather",  # the one for CPUs
    "all_reduce": "sum",
    "reduce_scatter_tensor": "sum",
    "wait_tensor": "wait",
}


def _issued(name: str, args: Any, result: Any) -> tuple[str, tuple[int, ...]] | None:
    return (NAMES[name], tuple(args[0].shape)) if name in NAMES else None


def _orders(context: ParallelContext, case: Case) -> list[list[Any]]:
    """Products and collectives with the shape of what they take, while training and while evaluating."""
    head = Head(case, TensorGroup.of(context.group("tp")))
    with Operations(_issued) as trained:
        head.loss()
    with Operations(_issued) as evaluated, torch.no_grad():
        head.loss()
    return [trained.noted, evaluated.noted]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_chunk_is_one_exchange_and_the_last_sum_runs_beside_a_product(sequence_parallel: bool) -> None:
    """Of three chunks: four numbers a token travel, and hidden's gradient once, during the weight's."""
    case = Case(chunk=16, label_smoothing=0.1, z_loss=0.1, sequence_parallel=sequence_parallel)
    layout = ParallelLayout(tp=2)
    for found in run_ranks(_orders, 2, case, layout=layout, dtype=torch.float64):
        trained, evaluated = ([name for name, _ in order] for order in found)
        start = ["gather", "wait"] if sequence_parallel else []  # of hidden
        chunk = ["product", "gather", "wait"]
        assert trained == start + 2 * [*chunk, "product", "weight"] + [*chunk, "product", "sum", "weight", "wait"]
        assert evaluated == start + 3 * chunk
        gathered = [shape for name, shape in found[0] if name == "gather"]
        assert gathered[len(start) // 2 :] == [(1, 4, 16)] * 3


# --- known mistakes --------------------------------------------------------------------------------------------------


def _none_but_small_pieces(case: Case) -> None:
    """No mistake: 5 of a chunk's 16 tokens at a time."""
    PIECE_ELEMENTS["cpu"] = 5 * case.padded // 2


def _without_hidden_sum(case: Case) -> None:
    loss_module.start_all_reduce = lambda x, group: x  # type: ignore[attr-defined]


def _scattered_in_the_wrong_order(case: Case) -> None:
    scatter = loss_module.start_reduce_scatter  # type: ignore[attr-defined]
    loss_module.start_reduce_scatter = lambda x, group: scatter(x.flip(0), group)  # type: ignore[attr-defined]


def _smoothing_over_the_columns_of_the_rank(case: Case) -> None:
    combine = TokenLoss.combine

    def broken(self: TokenLoss, statistics: Tensor) -> tuple[Tensor, Tensor]:
        statistics = statistics.clone()
        statistics[:, 3] = statistics[self.index, 3] / self.real * self.vocab_size / statistics.shape[0]
        return combine(self, statistics)

    TokenLoss.combine = broken  # type: ignore[method-assign]


def _label_counted_by_all(case: Case) -> None:
    """Each rank takes the label for its own, at the column nearest to it."""
    column = TokenLoss._column
    TokenLoss._column = lambda self, labels: (column(self, labels)[0], torch.ones_like(labels) > 0)  # type: ignore[method-assign]


def _without_exchange(case: Case) -> None:
    loss_module.start_all_gather = lambda x, group: torch.cat([x, x])  # type: ignore[attr-defined]


def _compute_with(context: ParallelContext, case: Case, change: Callable[[Case], None]) -> Result:
    change(case)
    return compute(case, TensorGroup.of(context.group("tp")))


def of_changed_ranks(case: Case, change: Callable[[Case], None]) -> list[Result]:
    return run_ranks(_compute_with, 2, case, change, layout=ParallelLayout(tp=2), dtype=torch.float64)


def test_pieces_of_a_chunk_do_not_show() -> None:
    case = Case(label_smoothing=0.1, z_loss=1e-2)
    assert_right(case, of_changed_ranks(case, _none_but_small_pieces))


@pytest.mark.parametrize(
    ("mistake", "sequence_parallel"),
    [
        (_without_hidden_sum, False),
        (_scattered_in_the_wrong_order, True),
        (_smoothing_over_the_columns_of_the_rank, False),
        (_label_counted_by_all, False),
        (_without_exchange, False),
    ],
)
def test_a_known_mistake_is_caught(mistake: Callable[[Case], None], sequence_parallel: bool) -> None:
    case = Case(label_smoothing=0.1, sequence_parallel=sequence_parallel)
    of_ranks = of_changed_ranks(case, mistake)
    with pytest.raises(AssertionError):
        assert_right(case, of_ranks)
