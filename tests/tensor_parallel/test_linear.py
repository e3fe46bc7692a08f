"""The one linear: its products, the order in which backward communicates, and the same of it compiled."""

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels import products
from megalite.kernels.products import add_transposed_product, compiled_add_transposed_product
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import OVERLAPPED
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.linear import PARTIAL_SUMS, linear
from tests.ranks import run_ranks

N, K = 6, 4
COPIED = ["input gradient", "all_reduce", "weight gradient", "wait"]
SEQUENCE = ["all_gather", "input gradient", "reduce_scatter", "wait", "weight gradient", "wait"]
MODES = list(product((False, True), repeat=2))  # sequence parallel, with a main gradient
Backward = tuple[list[str], list[tuple[int, ...]]]  # its steps, and shapes of what is saved for it


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("shape", [(5, 3, K), (7, K), (2, 3, 1, K), (0, 3, K)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_main_grad_receives_the_gradient_that_autograd_would_have_given(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, b = tensors(shape, (N, K), (N,))
    wanted = torch.autograd.grad(F.linear(x, weight, b).square().sum(), (x, weight, b))
    main_grad = torch.ones(2, N // 2, K, dtype=torch.float64)  # of the weight's logical shape
    for _ in range(2):
        linear(x, weight, b, main_grad=main_grad).square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(main_grad.view(N, K), 1 + 2 * wanted[1], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(x.grad, 2 * wanted[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(b.grad, 2 * wanted[2], rtol=1e-12, atol=1e-13)


def test_without_group_and_main_grad_it_is_torchs_linear() -> None:
    x, weight, bias = tensors((5, 3, K), (N, K), (N,))
    y = linear(x, weight, bias, deferred=DeferredWork())
    assert type(y.grad_fn) is type(F.linear(x, weight, bias).grad_fn)
    assert torch.equal(y, F.linear(x, weight, bias))


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


class Recorder(TorchDispatchMode):
    """The names of the steps that are run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        step = step_named(str(func), tuple(getattr(result, "shape", ())))
        self.steps += [step] if step else []
        return result


def recorded(context: ParallelContext) -> list[Backward]:
    """By mode, as eager torch runs it."""
    return [_recorded(context, *mode) for mode in MODES]


def _recorded(context: ParallelContext, sequence: bool, with_main_grad: bool) -> Backward:
    group = TensorGroup.of(context.group("tp"))
    x, weight = tensors((4, 3, K), (N, K))
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: (saved.append(tuple(kept.shape)), kept)[1], lambda x: x):
        main_grad = torch.zeros_like(weight) if with_main_grad else None
        y = linear(x, weight, group=group, sequence_parallel=sequence, main_grad=main_grad)
    with Recorder() as recorder:
        y.backward(torch.ones_like(y))
    return recorder.steps, saved


def test_the_input_gradient_is_communicated_while_the_weight_gradient_is_computed() -> None:
    for backwards in run_ranks(recorded, 2, layout=ParallelLayout(tp=2)):
        for (sequence, _), (steps, saved) in zip(MODES, backwards, strict=True):
            assert steps == (SEQUENCE if sequence else COPIED)
            assert saved == [(4, 3, K), (N, K)], "the gathered input is not kept"


def compiled_graphs(context: ParallelContext) -> list[Backward]:
    """By mode, in the graphs that a compiler gets, cut into forward and backward as inductor does."""
    return [_compiled_graphs(context, *mode) for mode in MODES]


def _compiled_graphs(context: ParallelContext, sequence: bool, with_main_grad: bool) -> Backward:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    group = TensorGroup.of(context.group("tp"))
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Callable:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x, weight = tensors((4, 3, K), (N, K))
    main_grad = torch.zeros_like(weight) if with_main_grad else None

    def run(x: Tensor) -> Tensor:
        return linear(2 * x, weight, group=group, sequence_parallel=sequence, main_grad=main_grad)

    y = torch.compile(run, fullgraph=True, backend=backend)(x)
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


def test_a_compiled_backward_has_the_same_order_and_gathers_anew() -> None:
    for backwards in run_ranks(compiled_graphs, 2, layout=ParallelLayout(tp=2)):
        for (sequence, _), (steps, saved) in zip(MODES, backwards, strict=True):
            assert steps == (SEQUENCE if sequence else COPIED)
            assert (8, 3, K) not in saved, "the gathered input is not kept"


@pytest.mark.parametrize(("sequences", "sums"), [(8, [(PARTIAL_SUMS, N), (N,)]), (3, [(N,)])])
def test_a_compiled_bias_gradient_before_an_activation_is_summed_in_parts_first(
    sequences: int, sums: list[tuple[int, ...]]
) -> None:
    """Where all parts have as many rows: that sum is a part of the pass that writes the activation's gradient."""
    from torch._dynamo.backends.common import aot_autograd

    shapes: list[tuple[int, ...]] = []

    def keep(graph: GraphModule, inputs: Any) -> Callable:
        shapes.extend(tuple(node.meta["val"].shape) for node in graph.graph.nodes if "aten.sum" in str(node.target))
        return graph.forward

    x, weight, bias = tensors((8, sequences, K), (N, K), (N,))
    main_grad = torch.zeros_like(weight)

    def run(x: Tensor) -> Tensor:
        return linear(x, weight, bias, main_grad=main_grad, before_activation=True).sin().sum((0, 1)).square()

    (wanted,) = torch.autograd.grad(run(x).sum(), bias)
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=keep)
    y = torch.compile(run, fullgraph=True, backend=backend)(x)
    (found,) = torch.autograd.grad(y.sum(), bias)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    assert shapes == sums


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

    group = TensorGroup.of(context.group("tp"))
    x, weight = tensors((4, 3, K), (N, K))
    main_grad = torch.zeros_like(weight)

    def run(x: Tensor) -> Tensor:
        return linear(2 * x, weight, group=group, sequence_parallel=sequence, main_grad=main_grad)

    compiled = torch.compile(run, fullgraph=True, options=OVERLAPPED)
    _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    calls = re.findall(r"^ +(?:\w+ = )?(torch\.ops\.\S+|extern_kernels\.mm)\(", codes[-1], re.MULTILINE)
    found = [step_named(call, (N, K) if "transposed" in call else (1,)) for call in calls if "copy_after" not in call]
    return [step for step in found if step]


@pytest.mark.long
@pytest.mark.parametrize(("sequence", "steps"), [(False, COPIED), (True, SEQUENCE)])
def test_inductor_keeps_the_order(sequence: bool, steps: list[str]) -> None:
    for got in run_ranks(inductor_steps, 2, sequence, layout=ParallelLayout(tp=2), timeout=300):
        assert got == steps
