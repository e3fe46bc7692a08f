"""The chunked head and loss of a vocabulary that ranks share: torch's numbers, its order of work, its memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model import loss as loss_module
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.cross_entropy import PIECE_ELEMENTS, TokenLoss
from tests.model.losses import linear_cross_entropy, reference_losses
from tests.model.test_loss import peak_bytes, product_bytes, relative_error
from tests.ranks import run_ranks


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
    dtype: torch.dtype = torch.float64
    compile: bool = False

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """hidden, weight, labels, loss mask, scale: of everything."""
        generator = torch.Generator().manual_seed(self.padded)
        hidden = torch.randn(self.n, self.width, generator=generator, dtype=torch.float64).to(self.dtype)
        weight = torch.randn(self.padded, self.width, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, self.vocab, (self.n,), generator=generator)
        labels[:2] = torch.tensor([0, self.vocab - 1])
        mask = torch.rand(self.n, generator=generator) < (0.0 if self.masked else 0.7)
        mask[:2] = not self.masked
        return hidden, (self.spread * weight).to(self.dtype), labels, mask, torch.tensor(0.37, dtype=torch.float64)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients of hidden and weight, by torch, of all logits at once."""
        hidden, weight, labels, mask, scale = self.inputs()
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        logits = hidden @ weight[: self.vocab].t()
        loss = scale * reference_losses(logits, labels, self.label_smoothing, self.z_loss)[mask].sum()
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@dataclass(frozen=True)
class Result:
    """Of one rank: the loss, as trained and as evaluated, and its gradients."""

    loss: Tensor
    evaluated: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def of_rank(case: Case, group: TensorGroup | None) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """This rank's hidden states and weight, and their loss as a function of the options of `linear_cross_entropy`."""
    index, size = (0, 1) if group is None else (group.index, group.size)
    hidden, weight, labels, mask, scale = case.inputs()
    if case.sequence_parallel:
        hidden = hidden[index * case.n // size : (index + 1) * case.n // size]
    weight = weight[index * case.padded // size : (index + 1) * case.padded // size]
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    settings: dict[str, Any] = {"vocab_size": case.vocab, "padded_vocab": case.padded, "group": group}
    settings |= {"label_smoothing": case.label_smoothing, "z_loss": case.z_loss, "compile": case.compile}
    settings |= {"sequence_parallel": case.sequence_parallel, "chunk_tokens": case.chunk}
    return (
        hidden,
        weight,
        lambda **options: linear_cross_entropy(hidden, weight, labels, mask, scale, **{**settings, **options}),
    )


def compute(case: Case, group: TensorGroup | None) -> Result:
    hidden, weight, loss = of_rank(case, group)
    main_grad = torch.full(weight.shape, 2.0, dtype=torch.float64) if case.main_grad else None
    with torch.no_grad():
        evaluated = loss(main_grad=main_grad)
    trained = loss(main_grad=main_grad)
    trained.backward()
    assert hidden.grad is not None
    assert (weight.grad is None) == case.main_grad
    weight_grad = weight.grad if main_grad is None else main_grad - 2.0
    assert weight_grad is not None
    return Result(trained.detach(), evaluated, hidden.grad, weight_grad)


def assert_right(case: Case, of_ranks: list[Result], tolerance: float = 1e-12) -> None:
    loss, hidden_grad, weight_grad = case.expected()
    for found in of_ranks:
        assert torch.equal(found.loss, of_ranks[0].loss), "the same bits on every rank"
        assert torch.equal(found.evaluated, found.loss)
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
    assert relative_error(of_ranks[0].loss, loss) < tolerance
    assert relative_error(found_hidden, hidden_grad) < tolerance
    assert relative_error(found_weight, weight_grad) < tolerance


CASES = [
    Case(),
    Case(sequence_parallel=True),
    Case(label_smoothing=0.1, z_loss=1e-2, sequence_parallel=True, main_grad=True),
    Case(label_smoothing=0.1, chunk=7),
    Case(z_loss=1e-2, chunk=48, main_grad=True),
    Case(chunk=1, label_smoothing=0.3, sequence_parallel=True),
    Case(chunk=None, sequence_parallel=True),
    Case(vocab=7, padded=10, label_smoothing=0.3),  # over 4: the last rank has padding alone
    Case(vocab=7, padded=10, label_smoothing=0.3, z_loss=1e-2, sequence_parallel=True, main_grad=True),
    Case(vocab=2, padded=2, chunk=5),  # over 3 and 4: some rank has no row at all
    Case(vocab=100, padded=100, n=12, width=5, chunk=11, sequence_parallel=True),
    Case(masked=True, label_smoothing=0.1, z_loss=1e-2),
    Case(masked=True, sequence_parallel=True),
    Case(spread=1e4, label_smoothing=0.1, sequence_parallel=True),
    Case(spread=1e-9, label_smoothing=0.1, z_loss=1e-2),
]


def _compute(context: ParallelContext, cases: list[Case]) -> list[Result]:
    group = TensorGroup.of(context.group("tp"))
    return [compute(case, group) for case in cases]


@pytest.mark.parametrize("case", [case for case in CASES if not case.sequence_parallel], ids=str)
def test_one_process_equals_torch(case: Case) -> None:
    assert_right(case, [compute(case, None)])


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_equal_torch(size: int) -> None:
    of_ranks = run_ranks(_compute, size, CASES, layout=ParallelLayout(tp=size), dtype=torch.float64)
    for case, *results in zip(CASES, *of_ranks, strict=True):
        assert_right(case, results)


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


def _compute_in_pieces(context: ParallelContext, case: Case) -> Result:
    PIECE_ELEMENTS["cpu"] = 5 * case.padded // 2  # 5 of a chunk's 16 tokens at a time
    return compute(case, TensorGroup.of(context.group("tp")))


def test_pieces_of_a_chunk_do_not_show() -> None:
    case = Case(label_smoothing=0.1, z_loss=1e-2)
    assert_right(case, run_ranks(_compute_in_pieces, 2, case, layout=ParallelLayout(tp=2), dtype=torch.float64))


def test_bf16_keeps_fp32_statistics_over_ranks() -> None:
    wide = {"n": 300, "width": 64, "vocab": 4000, "padded": 4096, "spread": 0.1, "dtype": torch.bfloat16}
    cases = [Case(label_smoothing=0.1, sequence_parallel=parallel, **wide) for parallel in (False, True)]  # type: ignore[arg-type]
    of_ranks = run_ranks(_compute, 2, cases, layout=ParallelLayout(tp=2))
    for case, *results in zip(cases, *of_ranks, strict=True):
        assert_right(case, results, tolerance=2**-6)
        assert relative_error(results[0].loss, case.expected()[0]) < 1e-4


NAMES = {
    "mm": "product",
    "addmm_": "weight",
    "all_gather_into_tensor_out": "gather",  # the one for CPUs
    "all_reduce": "sum",
    "reduce_scatter_tensor": "sum",
    "wait_tensor": "wait",
}


class _Recorder(TorchDispatchMode):
    """The products and collectives, in the order in which they are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.gathered: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = NAMES.get(func.overloadpacket.__name__)
        if name is not None:
            self.order.append(name)
        if name == "gather":
            self.gathered.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def _orders(context: ParallelContext, case: Case) -> tuple[list[str], list[str], list[tuple[int, ...]]]:
    """The order while training and while evaluating, and the shapes that training gathers."""
    _, _, loss = of_rank(case, TensorGroup.of(context.group("tp")))
    with _Recorder() as trained:
        loss()
    with _Recorder() as evaluated, torch.no_grad():
        loss()
    return trained.order, evaluated.order, trained.gathered


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_product_is_issued_before_each_wait(sequence_parallel: bool) -> None:
    """Of three chunks: statistics travel during the next chunk's product, the last sum during the weight's gradient."""
    case = Case(chunk=16, label_smoothing=0.1, z_loss=0.1, sequence_parallel=sequence_parallel)
    layout = ParallelLayout(tp=2)
    for trained, evaluated, gathered in run_ranks(_orders, 2, case, layout=layout, dtype=torch.float64):
        start = ["gather", "wait"] if sequence_parallel else []  # of hidden
        issued, settled = ["product", "gather"], ["wait", "product", "weight"]
        last = ["wait", "product", "sum", "weight", "wait"]
        assert trained == start + issued + issued + settled + issued + settled + last
        assert evaluated == start + issued + issued + ["wait"] + issued + ["wait", "wait"]
        assert gathered[-3:] == [(4, 16)] * 3  # one collective a chunk, four numbers a token
        assert len(gathered) == (4 if sequence_parallel else 3)


def _peaks(context: ParallelContext, case: Case, chunks: list[int]) -> list[tuple[int, int]]:
    """Peak bytes with and without gradients, for each length of chunk."""
    _, weight, loss = of_rank(case, TensorGroup.of(context.group("tp")))
    main_grad = torch.zeros(weight.shape)
    found = []
    for chunk in chunks:
        trained = peak_bytes(lambda: loss(chunk_tokens=chunk, main_grad=main_grad))  # noqa: B023
        with torch.no_grad():
            evaluated = peak_bytes(lambda: loss(chunk_tokens=chunk, main_grad=main_grad))  # noqa: B023
        found.append((trained, evaluated))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)])
def test_memory_is_that_of_two_chunks_of_the_ranks_columns(dtype: torch.dtype) -> None:
    """What the docstring says: two chunks of logits, two fp32 pieces, a few [n, h] (one of gloo), little per token."""
    n, vocab, width, size, chunks = 4096, 4096, 16, 2, [256, 512, 1024]
    layout, itemsize = ParallelLayout(tp=size), dtype.itemsize
    for sequence_parallel in (False, True):
        case = Case(4000, vocab, None, 0.1, 0.0, sequence_parallel, n=n, width=width, dtype=dtype)
        for peaks in run_ranks(_peaks, size, case, chunks, layout=layout):
            for chunk, (trained, evaluated) in zip(chunks, peaks, strict=True):
                logits = chunk * vocab // size
                products = product_bytes(chunk, vocab // size, width, dtype)
                rest = 2 * 4 * min(logits, PIECE_ELEMENTS["cpu"]) + products + 64 * n + 16384
                assert trained <= 2 * itemsize * logits + rest + 4 * n * width * itemsize < 4 * n * vocab / size
                assert evaluated <= itemsize * logits + rest + n * width * itemsize
            growth = 512 * vocab // size * itemsize  # beyond a piece the logits grow with the chunk, and statistics
            packed = [product_bytes(chunk, vocab // size, width, dtype) for chunk in chunks[1:]]
            assert abs(peaks[2][0] - peaks[1][0] - 2 * growth) < 512 * 512 + packed[1] - packed[0]
            assert abs(peaks[2][1] - peaks[1][1] - growth) < 512 * 512 + packed[1] - packed[0]


# --- known mistakes --------------------------------------------------------------------------------------------------


def _without_hidden_sum() -> None:
    loss_module.start_all_reduce = lambda x, group: x  # type: ignore[attr-defined]


def _scattered_in_the_wrong_order() -> None:
    scatter = loss_module.start_reduce_scatter  # type: ignore[attr-defined]
    loss_module.start_reduce_scatter = lambda x, group: scatter(x.flip(0), group)  # type: ignore[attr-defined]


def _smoothing_over_the_columns_of_the_rank() -> None:
    combine = TokenLoss.combine

    def broken(self: TokenLoss, statistics: Tensor) -> tuple[Tensor, Tensor]:
        index = 0 if self.group is None else self.group.index
        statistics = statistics.clone()
        statistics[:, 3] = statistics[index, 3] / self.real * self.vocab_size / statistics.shape[0]
        return combine(self, statistics)

    TokenLoss.combine = broken  # type: ignore[method-assign]


def _label_counted_by_all() -> None:
    """Each rank takes the label for its own, at the column nearest to it."""
    column = TokenLoss._column
    TokenLoss._column = lambda self, labels: (column(self, labels)[0], None)  # type: ignore[method-assign]


def _without_exchange() -> None:
    TokenLoss.start_exchange = lambda self, local: torch.stack([local, local])  # type: ignore[method-assign]


def _compute_broken(context: ParallelContext, case: Case, mistake: Callable[[], None]) -> Result:
    mistake()
    return compute(case, TensorGroup.of(context.group("tp")))


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
def test_a_known_mistake_is_caught(mistake: Callable[[], None], sequence_parallel: bool) -> None:
    case = Case(label_smoothing=0.1, sequence_parallel=sequence_parallel)
    layout = ParallelLayout(tp=2)
    of_ranks = run_ranks(_compute_broken, 2, case, mistake, layout=layout, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_right(case, of_ranks)
