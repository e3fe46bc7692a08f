"""The one linear: its products, the order in which backward communicates, and the same of it compiled."""

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule

from megalite.kernels import products
from megalite.kernels.products import add_transposed_product, compiled_add_transposed_product
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import OVERLAPPED
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.linear import PARTIAL_SUMS, activated, linear
from tests.ranks import run_ranks
from tests.tensor_parallel.operations import Operations

N, K = 6, 4
COPIED = ["input gradient", "all_reduce", "weight gradient", "wait"]
SEQUENCE = ["all_gather", "input gradient", "reduce_scatter", "wait", "weight gradient", "wait"]
MODES = list(product((False, True), repeat=2))  # sequence parallel, with a main gradient
Backward = tuple[list[str], list[tuple[int, ...]]]  # its steps, and shapes of what is saved for it


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, bias = (tensor.detach() for tensor in tensors((5, K), (N, K), (N,)))
    main_grad = torch.zeros(N, K, dtype=torch.float64)
    linear(x, weight, bias.requires_grad_(), main_grad=main_grad).sum().backward()
    assert (x.grad, weight.grad, main_grad.count_nonzero().item()) == (None, None, 0)
    assert torch.equal(bias.grad, torch.full((N,), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("tile_elements", [1, 3 * K, 1 << 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_narrow_products_add_up_in_a_wide_main_grad(
    monkeypatch: pytest.MonkeyPatch, tile_elements: int, compiled: bool
) -> None:
    monkeypatch.setattr(products, "TILE_ELEMENTS", tile_elements)
    left, right = tensors((5, 7), (5, K), dtype=torch.bfloat16)
    total = torch.full((7, K), 512.0)  # where bf16 steps by 4
    add = compiled_add_transposed_product if compiled else add_transposed_product
    with torch.no_grad():
        add(total, left, right)
        assert torch.equal(total, 512 + (left.t() @ right).float())


@pytest.mark.gpu
def test_narrow_products_add_up_in_a_wide_main_grad_on_cuda() -> None:
    left, right = (tensor.detach().cuda() for tensor in tensors((64, 24), (64, 16), dtype=torch.bfloat16))
    wanted = 512 + left.float().t() @ right.float()
    total = torch.full((24, 16), 512.0, device="cuda")
    add_transposed_product(total, left, right)
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-4)
    main_grad = torch.full((24, 16), 512.0, device="cuda")
    weight = torch.nn.Parameter(torch.empty(24, 16, dtype=torch.bfloat16, device="cuda"))
    torch.compile(linear, fullgraph=True)(right, weight, main_grad=main_grad).backward(left)
    torch.testing.assert_close(main_grad, wanted, rtol=1e-6, atol=1e-4)


def step_named(name: str, shape: tuple[int, ...]) -> str | None:
    """The step of backward that an op of this name, with a result of this shape, is; None if it is no step."""
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "wait"):
        if collective in name:
            return collective
    if not any(word in name for word in ("mm", "matmul", "add_transposed_product")):
        return None
    return "weight gradient" if shape in ((N, K), ()) else "input gradient"


def column(context: ParallelContext, sequence: bool, with_main_grad: bool, factor: float = 1) -> Any:
    """The product of a mode, as a function of x [4, 3, k]."""
    _, weight = tensors((4, 3, K), (N, K))
    main_grad = torch.zeros_like(weight) if with_main_grad else None
    settings = {"group": TensorGroup.of(context.group("tp")), "sequence_parallel": sequence, "main_grad": main_grad}
    return lambda x: linear(factor * x, weight, **settings)  # type: ignore[arg-type]


def backwards(context: ParallelContext) -> list[Backward]:
    """By mode, as eager torch runs it, and in the graphs that a compiler gets, cut as inductor does."""
    found = []
    for mode in MODES:
        (x,), shapes = tensors((4, 3, K)), list[tuple[int, ...]]()
        with saved_tensors_hooks(lambda kept: (shapes.append(tuple(kept.shape)), kept)[1], lambda x: x):  # noqa: B023
            y = column(context, *mode)(x)
        with Operations(lambda name, _, result: step_named(name, tuple(getattr(result, "shape", ())))) as operations:
            y.backward(torch.ones_like(y))
        found += [(operations.noted, shapes), compiled_backward(context, *mode)]
    return found


def compiled_backward(context: ParallelContext, *mode: bool) -> Backward:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Callable:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    y = torch.compile(column(context, *mode, factor=2), fullgraph=True, backend=backend)(tensors((4, 3, K))[0])
    y.backward(torch.ones_like(y))
    forward, backward = graphs
    steps = []
    for node in backward.graph.nodes:
        if node.op == "call_function":
            shape = tuple(node.meta["val"].shape) if isinstance(node.meta["val"], Tensor) else ()
            step = step_named(str(node.args[0] if "auto_functionalized" in str(node.target) else node.target), shape)
            steps += [step] if step else []
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    return steps, [tuple(kept.meta["val"].shape) for kept in output.args[0][1:]]


def test_the_input_gradient_is_communicated_while_the_weight_gradient_is_computed() -> None:
    """Eager and compiled; the gathered input is not kept."""
    for of_rank in run_ranks(backwards, 2, layout=ParallelLayout(tp=2)):
        for (sequence, _), eager, compiled in zip(MODES, of_rank[::2], of_rank[1::2], strict=True):
            assert eager[0] == compiled[0] == (SEQUENCE if sequence else COPIED)
            assert eager[1] == [(4, 3, K), (N, K)]
            assert (8, 3, K) not in compiled[1]


@pytest.mark.parametrize(
    ("sequences", "sums", "gradient"), [(8, [(PARTIAL_SUMS, N), (N,)], (2, PARTIAL_SUMS, N)), (3, [(N,)], (8, 3, N))]
)
def test_a_compiled_bias_gradient_before_an_activation_is_summed_in_parts_first(
    sequences: int, sums: list[tuple[int, ...]], gradient: tuple[int, ...]
) -> None:
    """Where all parts have as many rows: the pass that writes the activation's gradient, in their shape, sums them."""
    from torch._dynamo.backends.common import aot_autograd

    shapes: dict[str, list[tuple[int, ...]]] = {"aten.sum": [], "aten.cos": []}

    def keep(graph: GraphModule, inputs: Any) -> Callable:
        for name, node in product(shapes, graph.graph.nodes):
            shapes[name] += [tuple(node.meta["val"].shape)] if name in str(node.target) else []
        return graph.forward

    x, weight, bias = tensors((8, sequences, K), (N, K), (N,))
    main_grad = torch.zeros_like(weight)

    def run(x: Tensor) -> Tensor:
        y = linear(x, weight, bias, main_grad=main_grad, before_activation=True)
        return activated(torch.sin, y).sum((0, 1)).square()

    (wanted,) = torch.autograd.grad(run(x).sum(), bias)
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=keep)
    y = torch.compile(run, fullgraph=True, backend=backend)(x)
    (found,) = torch.autograd.grad(y.sum(), bias)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    assert shapes == {"aten.sum": sums, "aten.cos": [gradient]}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sequences", [8, 3])
def test_a_compiled_bias_gradient_is_that_of_fp64(sequences: int, device: str) -> None:
    """In bf16: gradients of the activation are rounded, summed in fp32, and the sum is rounded. x and weight have few
    bits and one number a row, so that the product is exact: before the sum there are one rounding and the sine's."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(-8, 8, shape, generator=generator) / 8 for shape in ((64, sequences, 1), (N, 1))]
    x, weight = (part.to(device, torch.bfloat16).requires_grad_() for part in drawn)
    bias = torch.zeros(N, dtype=torch.bfloat16, device=device, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y = linear(x, weight, bias, main_grad=main_grad, before_activation=True)
        return activated(torch.sin, y)

    main_grad = torch.zeros(N, 1, device=device)
    grad = torch.randn(64, sequences, N, generator=generator).bfloat16()
    (found,) = torch.autograd.grad(torch.compile(run, fullgraph=True)(x), bias, grad.to(device))
    terms = grad.double() * torch.cos(drawn[0].double() @ drawn[1].double().t())
    wanted, magnitude = terms.sum((0, 1)), terms.abs().sum((0, 1))
    rounded, eps = torch.finfo(torch.bfloat16).eps / 2, torch.finfo(torch.float32).eps
    bound = (rounded * 1.01 + (64 * sequences + 8) * eps) * magnitude + rounded * wanted.abs()
    assert bool(((found.cpu().double() - wanted).abs() <= bound).all())


def compiled_and_not(context: ParallelContext, backend: str) -> None:
    """Two products whose main gradients lie in one buffer, in all modes: compiled results are the eager ones."""
    group = TensorGroup.of(context.group("tp"))
    for grouped, sequence, with_main_grad in product((False, True), repeat=3):
        if sequence and not grouped:
            continue
        x, up, down, bias = tensors((4, 3, K), (2, N // 2, K), (K, N), (N,))
        buffer = torch.zeros(5 + 2 * N * K, dtype=torch.float64)
        main_grads = (
            [buffer[5:][: N * K].view(N, K), buffer[5 + N * K :].view_as(down)] if with_main_grad else [None, None]
        )
        column = {"group": group if grouped else None, "sequence_parallel": sequence, "main_grad": main_grads[0]}

        def run(x: Tensor) -> Tensor:
            y = linear(x, up.flatten(0, -2), bias, **column)  # noqa: B023 (called at once)
            return linear(y.relu(), down, main_grad=main_grads[1]).square()  # noqa: B023

        results = []
        for function in (run, torch.compile(run, fullgraph=True, dynamic=False, backend=backend)):
            buffer.fill_(1.0)
            for _ in range(2):
                leaves = (x, bias) if with_main_grad else (x, bias, up, down)
                y = function(x)
                gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
            results.append((y.detach(), *gradients, buffer.clone()))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
        assert (results[0][-1][-1] != 1.0) == with_main_grad


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_results_are_the_eager_ones(backend: str) -> None:
    run_ranks(compiled_and_not, 2, backend, layout=ParallelLayout(tp=2), timeout=300)


def inductor_steps(context: ParallelContext, sequence: bool) -> list[str]:
    """The order of the steps in the code that inductor writes for backward, with the options of a block."""
    from torch._inductor.utils import run_and_get_code

    (x,) = tensors((4, 3, K))
    compiled = torch.compile(column(context, sequence, True, factor=2), fullgraph=True, options=OVERLAPPED)
    _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    calls = re.findall(r"^ +(?:\w+ = )?(torch\.ops\.\S+|extern_kernels\.mm)\(", codes[-1], re.MULTILINE)
    found = [step_named(call, (N, K) if "transposed" in call else (1,)) for call in calls if "copy_after" not in call]
    return [step for step in found if step]


@pytest.mark.long
@pytest.mark.parametrize(("sequence", "steps"), [(False, COPIED), (True, SEQUENCE)])
def test_inductor_keeps_the_order(sequence: bool, steps: list[str]) -> None:
    for got in run_ranks(inductor_steps, 2, sequence, layout=ParallelLayout(tp=2), timeout=300):
        assert got == steps
