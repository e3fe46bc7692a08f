"""The chunked head and loss against torch's own, and its memory."""

import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

from megalite.kernels.pieces import ELEMENTS
from megalite.kernels.products import TILE_ELEMENTS
from megalite.model import loss as loss_module
from megalite.model.loss import _default_chunk
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.cross_entropy import PIECE_ELEMENTS
from tests.model.losses import linear_cross_entropy, reference_losses, token_loss_of

N, WIDTH, VOCAB, PADDED = 50, 24, 101, 128


class Case:
    """Inputs of one comparison: a ragged mask and a padded vocabulary unless said otherwise."""

    def __init__(self, dtype: torch.dtype, *, n: int = N, width: int = WIDTH, vocab: int = VOCAB, padded: int = PADDED):
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(n, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        self.weight = torch.randn(padded, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        self.labels = torch.randint(0, vocab, (n,), generator=generator)
        self.mask = torch.rand(n, generator=generator) < 0.7
        self.scale = torch.tensor(0.37, dtype=torch.float64)
        self.vocab_size = vocab

    def loss(self, **options: Any) -> Tensor:
        return linear_cross_entropy(
            self.hidden, self.weight, self.labels, self.mask, self.scale, vocab_size=self.vocab_size, **options
        )

    def reference(self, label_smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients in fp64 from the same (rounded) inputs, by torch."""
        hidden = self.hidden.detach().double().requires_grad_()
        weight = self.weight.detach().double().requires_grad_()
        logits = hidden @ weight[: self.vocab_size].t()
        losses = reference_losses(logits[self.mask], self.labels[self.mask], label_smoothing, z_loss)
        loss = self.scale * losses.sum()
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    def gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        return torch.autograd.grad(loss, (self.hidden, self.weight))


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("chunk", [1, 7, 16, N, 10 * N, None])
def test_loss_and_gradients_equal_torch_in_fp64_for_every_chunk(chunk: int | None) -> None:
    case = Case(torch.float64)
    loss = case.loss(chunk_tokens=chunk)
    assert loss.dtype == torch.float64
    assert loss.shape == ()
    for value, reference in zip((loss.detach(), *case.gradients(loss)), case.reference(), strict=True):
        assert relative_error(value, reference) < 1e-12


def test_upstream_gradient_multiplies_both_gradients() -> None:
    case = Case(torch.float64)
    gradients = case.gradients(-3.5 * case.loss(chunk_tokens=16))
    for value, reference in zip(gradients, case.reference()[1:], strict=True):
        assert relative_error(value, -3.5 * reference) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        *((dtype, False) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.long),  # of two ranks: test_parallel_loss.py
    ],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_padding_of_the_vocabulary_does_not_enter_loss_or_gradients(dtype: torch.dtype, compiled: bool) -> None:
    case = Case(dtype)
    loss = case.loss(chunk_tokens=16, compile=compiled)
    hidden_grad, weight_grad = case.gradients(loss)
    with torch.no_grad():
        case.weight[VOCAB:] = 1000.0  # would take all the probability
    repeated = case.loss(chunk_tokens=16, compile=compiled)
    assert torch.equal(repeated, loss)
    assert torch.equal(case.gradients(repeated)[0], hidden_grad)
    assert torch.count_nonzero(weight_grad[VOCAB:]) == 0
    assert torch.count_nonzero(weight_grad[:VOCAB]) > 0


def test_loss_of_an_impossible_label_is_exact_not_infinite() -> None:
    """The label's probability, exp(-2000), is zero in every format; its logarithm is not."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [2000.0]])
    scale, mask = torch.ones(()), torch.ones(1, dtype=torch.bool)
    assert linear_cross_entropy(hidden, weight, torch.tensor([0]), mask, scale, vocab_size=2).item() == 2000.0


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.usefixtures("fresh_compiler")
def test_not_a_number_stays_visible(compiled: bool) -> None:
    case = Case(torch.float32)
    with torch.no_grad():
        case.hidden[int(case.mask.nonzero()[0])] = torch.nan
    assert case.loss(compile=compiled).isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_main_grad_receives_what_autograd_would_have_returned(dtype: torch.dtype) -> None:
    case = Case(dtype)
    expected_hidden, expected_weight = case.gradients(case.loss(chunk_tokens=16))
    main_grad = torch.full(case.weight.shape, 2.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    before = main_grad.clone()
    case.loss(chunk_tokens=16, main_grad=main_grad).backward()
    assert case.weight.grad is None
    assert case.hidden.grad is not None
    assert torch.equal(case.hidden.grad, expected_hidden)
    assert (
        relative_error(main_grad - before, expected_weight.double())
        < {
            torch.float64: 1e-14,
            torch.float32: 1e-6,
            torch.bfloat16: 4e-3,  # the returned gradient is rounded to bf16, the main gradient is not
            torch.float16: 5e-4,
        }[dtype]
    )


@pytest.mark.parametrize("frozen", ["no_grad", "weight"])
def test_main_grad_is_untouched_where_the_weight_takes_no_gradient(frozen: str) -> None:
    case, main_grad = Case(torch.float32), torch.zeros(PADDED, WIDTH)
    case.weight.requires_grad_(frozen != "weight")
    with torch.set_grad_enabled(frozen != "no_grad"):
        loss = case.loss(main_grad=main_grad)
    assert loss.requires_grad == (frozen == "weight")
    assert torch.count_nonzero(main_grad) == 0


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_gradient_of_one_input_alone(frozen: str) -> None:
    case = Case(torch.float64)
    getattr(case, frozen).requires_grad_(False)
    case.loss(chunk_tokens=16).backward()
    _, hidden_grad, weight_grad = Case(torch.float64).reference()
    wanted, reference = (case.weight, weight_grad) if frozen == "hidden" else (case.hidden, hidden_grad)
    assert wanted.grad is not None
    assert relative_error(wanted.grad, reference) < 1e-12
    assert getattr(case, frozen).grad is None


def accuracy(dtype: torch.dtype, *, scale: float = 0.37, **options: Any) -> tuple[float, float, float]:
    """Relative errors of loss and both gradients against fp64, at a vocabulary where bf16 statistics fail."""
    case = Case(dtype, n=300, width=64, vocab=4000, padded=4096)
    case.scale.fill_(scale)
    with torch.no_grad():
        case.weight.mul_(0.1)  # logits of about unit size, as trained models have
    loss = case.loss(**options)
    errors = [
        relative_error(value, reference)
        for value, reference in zip((loss.detach(), *case.gradients(loss)), case.reference(), strict=True)
    ]
    return errors[0], errors[1], errors[2]


@pytest.mark.parametrize("chunk", [64, None])
def test_fp32_is_accurate(chunk: int | None) -> None:
    loss, hidden_grad, weight_grad = accuracy(torch.float32, chunk_tokens=chunk)
    assert loss < 1e-6
    assert hidden_grad < 1e-5
    assert weight_grad < 1e-5


@pytest.mark.parametrize("chunk", [64, None])
def test_bf16_keeps_fp32_statistics(chunk: int | None) -> None:
    loss, hidden_grad, weight_grad = accuracy(torch.bfloat16, chunk_tokens=chunk)
    assert loss < 1e-4
    assert hidden_grad < 2**-7
    assert weight_grad < 2**-7


def test_fp16_keeps_fp32_statistics() -> None:
    loss, hidden_grad, weight_grad = accuracy(torch.float16, scale=65536 / 300, chunk_tokens=64)
    assert loss < 1e-5
    assert hidden_grad < 2**-10
    assert weight_grad < 2**-10


def test_bf16_loss_does_not_saturate_over_many_tokens() -> None:
    """A sum kept in bf16 stops growing at 256 times its terms; this one is of 2,000 equal token losses of log 2."""
    n = 2000
    hidden, weight = torch.zeros(n, 8, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16)
    mask = torch.ones(n, dtype=torch.bool)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(n, dtype=torch.int64), mask, torch.ones(()), vocab_size=2)
    assert loss.dtype == torch.float32
    assert relative_error(loss, n * torch.log(torch.tensor(2.0, dtype=torch.float64))) < 1e-6


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


def memory_bound(case: Case, chunk: int, *, main_grad: bool) -> int:
    """Logits of a chunk, two fp32 pieces, the gradients that are returned, a few numbers per token, and what the
    library of matrix products packs for itself."""
    (n, width), padded, size = case.hidden.shape, case.weight.shape[0], case.hidden.element_size()
    logits = chunk * padded * size
    softmax_pieces = 2 * 4 * min(chunk * padded, PIECE_ELEMENTS["cpu"])
    weight_grad = 0 if main_grad else padded * width * (4 + 2 * size)  # fp32 sum, its copy for backward, times upstream
    returned = weight_grad + 2 * n * width * size
    return logits + softmax_pieces + product_bytes(chunk, padded, width, case.hidden.dtype) + returned + 64 * n + 4096


def product_bytes(chunk: int, columns: int, width: int, dtype: torch.dtype) -> int:
    """What a chunk's products need besides their results: tiles to be widened, and the most that one product packs."""
    tile, piece = (min(columns * width, most) for most in (TILE_ELEMENTS, ELEMENTS * torch.get_num_threads()))
    shapes = ((chunk, width), (columns, width), (chunk, columns))
    x, weight, logits = (torch.ones(shape, dtype=dtype) for shape in shapes)
    products = [(x, weight.t(), logits), (logits, weight, x), (logits.t(), x, weight)]
    packed = max(peak_bytes(partial(torch.mm, left, right, out=out)) for left, right, out in products)
    return packed + (0 if dtype == torch.float32 else tile * dtype.itemsize + piece * 4)


@pytest.mark.parametrize(
    ("dtype", "with_main_grad"),
    [
        pytest.param(torch.float32, True, marks=pytest.mark.long),
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.long),
    ],
)
def test_memory_is_that_of_a_chunk_and_never_of_all_logits(dtype: torch.dtype, with_main_grad: bool) -> None:
    n, vocab = 4096, 4096
    case = Case(dtype, n=n, width=16, vocab=vocab - 96, padded=vocab)
    case.scale = case.scale.float()
    main_grad = torch.zeros(case.weight.shape) if with_main_grad else None
    fp32_logits = 4 * n * vocab
    peaks = []
    for chunk in (256, 512, 1024):

        def step(chunk: int = chunk) -> Any:
            loss = case.loss(chunk_tokens=chunk, main_grad=main_grad)
            return torch.autograd.grad(loss, case.hidden if with_main_grad else (case.hidden, case.weight))

        peaks.append(peak_bytes(step))
        assert peaks[-1] <= memory_bound(case, chunk, main_grad=with_main_grad) < fp32_logits / 2
    assert peaks[0] < peaks[1]
    packed = [product_bytes(chunk, vocab, 16, dtype) for chunk in (512, 1024)]
    grown = peaks[2] - peaks[1] - 512 * vocab * dtype.itemsize  # the chunk's logits grow with it, and nothing of ours
    assert 0 <= grown <= packed[1] - packed[0]

    default = loss_module.CHUNK_BYTES // (vocab * dtype.itemsize)
    chosen = _default_chunk(case.weight, token_loss_of(case.weight, vocab_size=1))
    assert default == chosen > loss_module.CHUNK_TOKENS["cpu"]
    bound = memory_bound(case, default, main_grad=with_main_grad)
    assert peak_bytes(lambda: case.loss(main_grad=main_grad).backward()) <= bound < fp32_logits / 2

    def naive() -> Any:
        logits = (case.hidden @ case.weight[: case.vocab_size].t()).float()
        return torch.autograd.grad(F.cross_entropy(logits, case.labels), (case.hidden, case.weight))

    assert peak_bytes(naive) > fp32_logits  # the meter sees what must not happen


def test_ranks_with_uneven_parts_of_the_vocabulary_take_the_same_chunks() -> None:
    """Each chunk is one exchange: a rank with one of its own would wait for ever."""
    padded, groups = 4099, [TensorGroup("tp", 3, index) for index in range(3)]
    parts = [torch.empty((index + 1) * padded // 3 - index * padded // 3, 8) for index in range(3)]
    assert len({len(part) for part in parts}) == 2
    losses = [
        token_loss_of(part, vocab_size=padded, padded_vocab=padded, group=group)
        for part, group in zip(parts, groups, strict=True)
    ]
    assert len({_default_chunk(part, loss) for part, loss in zip(parts, losses, strict=True)}) == 1
    weight = torch.empty(50304, 1)
    assert _default_chunk(weight, token_loss_of(weight, vocab_size=1)) == loss_module.CHUNK_TOKENS["cpu"]


@pytest.mark.parametrize("main_grad", [True, False])
def test_nothing_as_large_as_logits_waits_for_backward(main_grad: bool) -> None:
    case = Case(torch.float32, n=512, width=16, vocab=1024, padded=1024)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor.nbytes), tensor)[1], lambda t: t):
        case.loss(chunk_tokens=128, main_grad=torch.zeros(case.weight.shape) if main_grad else None)
    assert sum(saved) == case.hidden.nbytes + (0 if main_grad else case.weight.nbytes)


SHAPING: list[dict[str, float]] = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("dtype", "shaping"),
    [
        pytest.param(torch.float64, SHAPING[0], marks=pytest.mark.long),
        pytest.param(torch.bfloat16, SHAPING[0]),
        pytest.param(torch.float64, SHAPING[1], marks=pytest.mark.long),  # of two ranks: test_parallel_loss.py
        pytest.param(torch.bfloat16, SHAPING[1], marks=pytest.mark.long),
    ],
)
def test_compiled_it_is_the_same_without_a_copy_of_the_logits(dtype: torch.dtype, shaping: dict[str, float]) -> None:
    """Chunks of 16 tokens and, at the end, of 2."""
    case, found, bound = Case(dtype), [], 1e-14 if dtype == torch.float64 else 2**-8
    for compiled in (False, True):
        main_grad = torch.zeros(case.weight.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        train = partial(case.loss, chunk_tokens=16, compile=compiled, main_grad=main_grad, **shaping)
        loss, codes = run_and_get_code(train)
        found.append((loss.detach(), torch.autograd.grad(loss, case.hidden)[0], main_grad))
        assert len(codes) == 2 * compiled
        # Nothing as large as the logits is allocated: sums are taken and gradients written as the logits are read.
        assert not re.search(rf"empty_strided\w*\(\((16|2), {PADDED}\)", "".join(codes))
        with torch.no_grad():
            assert relative_error(train(), loss.double()) < min(bound, 1e-6)
    for eager, compiled_value in zip(*found, strict=True):
        assert relative_error(compiled_value, eager.double()) < bound


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("compiled", "shaping"), [(False, SHAPING[0]), (True, SHAPING[0]), (True, SHAPING[1])], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cuda_equals_fp64_and_adds_into_the_main_grad(
    dtype: torch.dtype, compiled: bool, shaping: dict[str, float]
) -> None:
    case = Case(dtype, n=304, width=64, vocab=1000, padded=1024)
    expected = case.reference(**shaping)
    for name in ("hidden", "weight"):
        setattr(case, name, getattr(case, name).detach().cuda().requires_grad_())
    case.labels, case.mask, case.scale = case.labels.cuda(), case.mask.cuda(), case.scale.cuda()
    main_grad = torch.zeros(case.weight.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32).cuda()
    train = partial(case.loss, chunk_tokens=128, main_grad=main_grad, compile=compiled, **shaping)
    loss, codes = run_and_get_code(train)
    assert len(codes) == 2 * (compiled and dtype == torch.float64)  # chunks of 128 and 48 tokens; else one kernel
    loss.backward()
    assert case.hidden.grad is not None
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    for value, reference in zip((loss.detach(), case.hidden.grad, main_grad), expected, strict=True):
        assert relative_error(value.cpu(), reference) < bound
