"""The chunked head and loss of one process: torch's numbers in every precision, and memory of a chunk alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

from megalite.kernels.products import CACHED_ELEMENTS, TILE_ELEMENTS
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model import loss as loss_module
from megalite.model.loss import PIECE_ELEMENTS, TokenLoss, _default_chunk
from megalite.tensor_parallel.collectives import TensorGroup
from tests.model.losses import Case, Head, assert_right, compute, relative_error
from tests.ranks import run_ranks

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WIDE = Case(n=300, width=64, vocab=4000, padded=4096, spread=0.1)  # where statistics in bf16 fail


@pytest.mark.parametrize(
    ("case", "loss", "gradients"),
    [
        *((replace(WIDE, dtype=FP32, chunk=chunk), 1e-6, 1e-5) for chunk in (64, None)),
        *((replace(WIDE, dtype=BF16, chunk=chunk, main_grad=chunk == 64), 1e-4, 2**-7) for chunk in (64, None)),
        (replace(WIDE, dtype=FP16, chunk=64, scale=65536 / 300, main_grad=True), 1e-5, 2**-10),
    ],
    ids=str,
)
def test_narrow_numbers_keep_wide_statistics(case: Case, loss: float, gradients: float) -> None:
    assert_right(case, [compute(case)], loss, gradients)


def test_bf16_loss_does_not_saturate_over_many_tokens() -> None:
    """A sum kept in bf16 stops growing at 256 times its terms; this one is of 2,000 equal token losses of log 2."""
    head = Head(Case(n=2000, vocab=2, padded=2, spread=0.0, scale=1.0, dtype=BF16))
    head.mask.fill_(True)
    assert relative_error(head.loss(), 2000 * torch.log(torch.tensor(2.0, dtype=FP64))) < 1e-6


def test_an_upstream_gradient_multiplies_both_gradients() -> None:
    head = Head(Case())
    (-3.5 * head.loss()).backward()
    _, *expected = head.case.expected()
    for found, reference in zip((head.hidden.grad, head.weight.grad), expected, strict=True):
        assert found is not None
        assert relative_error(found, -3.5 * reference) < 1e-12


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.usefixtures("fresh_compiler")
def test_not_a_number_stays_visible(compiled: bool) -> None:
    head = Head(Case(dtype=FP32, compile=compiled))
    with torch.no_grad():
        head.hidden[0] = torch.nan
    assert head.loss().isnan()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_what_takes_no_gradient_gets_none(frozen: str, main_grad: bool) -> None:
    head = Head(Case(main_grad=main_grad))
    getattr(head, frozen).requires_grad_(False)
    head.loss().backward()
    weight_grad = head.weight.grad if head.main_grad is None else head.main_grad - 2.0
    found = {"hidden": head.hidden.grad, "weight": weight_grad}
    expected = dict(zip(found, head.case.expected()[1:], strict=True))
    assert found[frozen] is None or not found[frozen].any()
    (wanted,) = found.keys() - {frozen}
    assert relative_error(found[wanted], expected[wanted]) < 1e-12


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], Any]) -> int:
    """Largest sum of live CPU allocations made by `work`, counted by torch's own allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    del kept
    return max(live, default=0)


def product_bytes(chunk: int, columns: int, width: int, dtype: torch.dtype) -> int:
    """What a chunk's products need besides their results: tiles to be widened, and the most that one product packs."""
    tile, piece = (min(columns * width, most) for most in (TILE_ELEMENTS, CACHED_ELEMENTS * torch.get_num_threads()))
    shapes = ((chunk, width), (columns, width), (chunk, columns))
    x, weight, logits = (torch.ones(shape, dtype=dtype) for shape in shapes)
    products = [(x, weight.t(), logits), (logits, weight, x), (logits.t(), x, weight)]
    packed = max(peak_bytes(partial(torch.mm, left, right, out=out)) for left, right, out in products)
    return packed + (0 if dtype == torch.float32 else tile * dtype.itemsize + piece * 4)


def peaks_of(context: ParallelContext, case: Case, chunks: list[int]) -> list[tuple[int, int]]:
    """Peak bytes with and without gradients, for each length of chunk."""
    head, found = Head(case, TensorGroup.of(context.group("tp"))), []
    head.scale = head.scale.float()
    wanted = head.hidden if case.main_grad else (head.hidden, head.weight)
    for chunk in chunks:
        trained = peak_bytes(lambda: torch.autograd.grad(head.loss(chunk_tokens=chunk), wanted))  # noqa: B023
        with torch.no_grad():
            found.append((trained, peak_bytes(lambda: head.loss(chunk_tokens=chunk))))  # noqa: B023
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype", "main_grad"),
    [
        (1, FP32, False),
        (1, BF16, True),
        (2, BF16, True),
        *(pytest.param(*row, marks=pytest.mark.long) for row in ((1, FP32, True), (1, BF16, False), (2, FP32, True))),
    ],
)
def test_memory_is_that_of_a_chunk_and_never_of_all_logits(ranks: int, dtype: torch.dtype, main_grad: bool) -> None:
    """Logits of a chunk; two fp32 pieces; a few [n, h]; little per token."""
    n, vocab, width, chunks = 4096, 4096, 16, [256, 512, 1024]
    columns, size = vocab // ranks, dtype.itemsize
    weight_grad = 0 if main_grad else vocab * width * (4 + 2 * size)  # fp32 sum, its copy for backward, times upstream
    products = [product_bytes(chunk, columns, width, dtype) for chunk in chunks]
    for sequence_parallel in (False, True)[:ranks]:
        shaped = replace(Case(4000, vocab, n=n, width=width), dtype=dtype, main_grad=main_grad)
        case = replace(shaped, label_smoothing=0.1, sequence_parallel=sequence_parallel)
        if ranks == 1:
            of_ranks = [peaks_of(ParallelContext(dtype=dtype), case, chunks)]
        else:
            of_ranks = run_ranks(peaks_of, ranks, case, chunks, layout=ParallelLayout(tp=ranks), dtype=dtype)
        for peaks in of_ranks:
            for chunk, packed, (trained, evaluated) in zip(chunks, products, peaks, strict=True):
                logits = chunk * columns
                rest = 2 * 4 * min(logits, PIECE_ELEMENTS["cpu"]) + packed + 64 * n + 16384
                hidden = 2 * ranks * n * width * size
                assert trained <= size * logits + rest + hidden + weight_grad < 4 * n * columns
                assert evaluated <= size * logits + rest + n * width * size
            per_token = 512 if ranks > 1 else 8  # statistics, or losses: they grow with the chunk as its logits do
            for kind in (0, 1):
                grown = peaks[2][kind] - peaks[1][kind] - 512 * columns * size
                assert abs(grown) <= 512 * per_token + products[2] - products[1]
    hidden, weight, labels, _ = Case(4000, vocab, n=n, width=width, dtype=dtype).inputs()
    naive = peak_bytes(lambda: F.cross_entropy((hidden @ weight.t()).float(), labels))
    assert naive > 4 * n * vocab, "the meter sees what must not happen"


def test_ranks_with_uneven_parts_of_the_vocabulary_take_the_same_chunks() -> None:
    """Each chunk is one exchange: a rank with one of its own would wait for ever."""

    def chosen(weight: torch.Tensor, padded: int, group: TensorGroup | None = None) -> int:
        return _default_chunk(weight, TokenLoss(padded, group, padded, 0.0, 0.0))

    groups, stops = [TensorGroup("tp", 3, index) for index in range(3)], [at * 4099 // 3 for at in range(4)]
    parts = [torch.empty(stop - start, 8) for start, stop in pairwise(stops)]
    assert len({len(part) for part in parts}) == 2
    assert len({chosen(part, 4099, group) for part, group in zip(parts, groups, strict=True)}) == 1
    assert chosen(torch.empty(50304, 1), 50304) == loss_module.CHUNK_TOKENS["cpu"]
    assert chosen(torch.empty(4096, 1), 4096) == loss_module.CHUNK_BYTES // (4096 * 4) > loss_module.CHUNK_TOKENS["cpu"]


@pytest.mark.parametrize("main_grad", [True, False])
def test_nothing_as_large_as_logits_waits_for_backward(main_grad: bool) -> None:
    head = Head(Case(n=512, width=16, vocab=1024, padded=1024, chunk=128, dtype=FP32, main_grad=main_grad))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor.nbytes), tensor)[1], lambda t: t):
        head.loss()
    assert sum(saved) == head.hidden.nbytes + (0 if main_grad else head.weight.nbytes)


# --- compiled --------------------------------------------------------------------------------------------------------

SHAPED = Case(n=50, main_grad=True, label_smoothing=0.1, z_loss=1e-2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "case",
    [
        Case(n=50, main_grad=True, dtype=BF16),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (Case(n=50, main_grad=True), SHAPED, replace(SHAPED, dtype=BF16))
        ),
    ],
    ids=str,
)
def test_compiled_it_is_the_same_without_a_copy_of_the_logits(case: Case) -> None:
    """Chunks of 16 tokens and, at the end, of 2."""
    eager, bound = compute(case), 1e-14 if case.dtype == FP64 else 2**-8
    compiled, codes = run_and_get_code(partial(compute, replace(case, compile=True)))
    assert len(codes) == 4, "as evaluated and as trained, of two lengths"
    # Nothing as large as the logits is allocated: sums are taken and gradients written as the logits are read.
    assert not re.search(rf"empty_strided\w*\(\((16|2), {case.padded}\)", "".join(codes))
    for name, value in vars(eager).items():
        tolerance = min(bound, 1e-6) if name == "evaluated" else bound
        assert relative_error(getattr(compiled, name), value.double()) < tolerance, name


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "case", [Case(), Case(compile=True), Case(compile=True, label_smoothing=0.1, z_loss=1e-2, spread=0.1)], ids=str
)
@pytest.mark.parametrize(("dtype", "bound"), [(FP64, 1e-12), (FP32, 1e-4), (BF16, 2**-6), (FP16, 2**-9)])
def test_cuda_equals_fp64_and_adds_into_the_main_grad(dtype: torch.dtype, bound: float, case: Case) -> None:
    """Chunks of 128 and 48 tokens. Compiled, all but fp64 is one kernel, which inductor does not write."""
    case = replace(case, n=304, width=64, vocab=1000, padded=1024, chunk=128, main_grad=True, dtype=dtype)
    result, codes = run_and_get_code(partial(compute, case, device="cuda"))
    assert len(codes) == 4 * (case.compile and dtype == FP64)
    assert_right(case, [result], bound, bound)
