"""Weight gradients put off: backward-input computes none, the weight action all, to the same bits and in all the same
number of operations and collectives."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import GPT
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.linear import linear
from tests.model.small import ALL_DROPOUTS, CPU, FAMILIES, gpt, perturbed, random_batch, rank_of, small
from tests.ranks import run_ranks
from tests.tensor_parallel.live_bytes import LiveBytes

ALL_MODULES = ["attention", "norm", "activation"]
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective", "recompute_modules": ALL_MODULES},
    "full": {"recompute": "full"},
}
MICROBATCHES = 2
SCALE = torch.tensor(0.02, dtype=torch.float64)


def model_with_main_grads(
    family: str, group: TensorGroup | None = None, **settings: Any
) -> tuple[GPT, dict[str, Tensor]]:
    config = small(**FAMILIES[family], **ALL_DROPOUTS, num_layers=2)
    model = perturbed(config, **settings) if group is None else rank_of(perturbed(config), group, **settings)
    main_grads = {
        name: torch.zeros_like(model.get_parameter(name), requires_grad=False) for name in model.main_grad_parameters
    }
    model.set_main_grads(main_grads)
    return model, main_grads


def linear_weights(model: GPT) -> list[str]:
    """Whose gradients are put off."""
    layers = (ColumnParallelLinear, RowParallelLinear)
    return [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, layers)]


def outcome(model: GPT, main_grads: dict[str, Tensor]) -> dict[str, Tensor]:
    others = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert others.keys() | main_grads.keys() == dict(model.named_parameters()).keys()
    return {**others, **main_grads}


def undeferred(model: GPT, main_grads: dict[str, Tensor]) -> dict[str, Tensor]:
    for sample in range(MICROBATCHES):
        model.loss(random_batch(model.config, seed=sample, first_sample=sample), SCALE).backward()
    assert len(model.deferred) == 0
    return outcome(model, main_grads)


def deferred(model: GPT, main_grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """As zb-h1 does: some microbatches wait, and each is later done whole."""
    names = linear_weights(model)
    for sample in range(MICROBATCHES):
        before = {name: main_grads[name].clone() for name in names}
        loss = model.loss(random_batch(model.config, seed=sample, first_sample=sample), SCALE)
        with model.deferred.collecting():
            loss.backward()
        assert all(torch.equal(main_grads[name], before[name]) for name in names), (
            "backward-input added to a weight's main gradient"
        )
        if sample > 0:
            model.deferred.run_next()
            assert all(not torch.equal(main_grads[name], before[name]) for name in names)
    assert len(model.deferred) == 1
    model.deferred.run_next()
    return outcome(model, main_grads)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("family", FAMILIES)
def test_put_off_gradients_are_the_same_bits(family: str, recompute: dict[str, Any]) -> None:
    expected = undeferred(*model_with_main_grads(family, **recompute))
    assert_same_bits(deferred(*model_with_main_grads(family, **recompute)), expected)


ON_RANKS = [("gpt2", "none", False), ("llama", "selective", True), ("qwen3", "none", True), ("gpt2", "full", True)]


def _on_a_rank(context: ParallelContext) -> None:
    group = TensorGroup.of(context.group("tp"))
    for family, recompute, sequence_parallel in ON_RANKS:
        settings = {**RECOMPUTE[recompute], "sequence_parallel": sequence_parallel}
        expected = undeferred(*model_with_main_grads(family, group, **settings))
        assert_same_bits(deferred(*model_with_main_grads(family, group, **settings)), expected)


def test_put_off_gradients_are_the_same_bits_on_several_ranks() -> None:
    run_ranks(_on_a_rank, 2, dtype=torch.float64, layout=ParallelLayout(tp=2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_put_off_narrow_products_add_up_in_wide_main_grads(device: str) -> None:
    """On CUDA backward runs in a thread of its own."""
    shapes, results = ((48, 16), (16, 48)), []
    for split in (False, True):
        generator = torch.Generator().manual_seed(7)
        drawn = [torch.randn(shape, generator=generator) for shape in (*shapes, (64, 16))]
        *weights, x = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in drawn]
        main_grads = [torch.full(shape, 512.0, device=device) for shape in shapes]  # where bf16 steps by 4
        work = DeferredWork()
        y = linear(x, weights[0], main_grad=main_grads[0], deferred=work).relu()
        y = linear(y, weights[1], main_grad=main_grads[1], deferred=work)
        with work.collecting() if split else nullcontext():
            y.backward(torch.full_like(y, 0.01))
        assert all(bool((main_grad == 512.0).all()) == split for main_grad in main_grads)
        if split:
            work.run_next()
        results.append([x.grad, *main_grads])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# --- operations ------------------------------------------------------------------------------------------------------


class Flops(FlopCounterMode):
    """torch's counter knows no addition in place."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={torch.ops.aten.addmm_: self._flops})

    @staticmethod
    def _flops(total: tuple[int, int], left: tuple[int, int], right: tuple[int, int], **_: Any) -> int:
        return 2 * prod(total) * right[0]


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE)
def test_backward_input_and_weight_do_together_what_backward_does(recompute: dict[str, Any]) -> None:
    """The weight action all products of weights, backward-input all else, what is computed again included."""
    model, _ = model_with_main_grads("qwen3", **recompute)
    batch = random_batch(model.config)
    with Flops() as backward:
        loss = model.loss(batch, SCALE)
        before = backward.get_total_flops()
        loss.backward()
    whole = backward.get_total_flops() - before
    loss = model.loss(batch, SCALE)
    with Flops() as backward_input, model.deferred.collecting():
        loss.backward()
    with Flops() as weight:
        model.deferred.run_next()
    products = sum(2 * batch.tokens.numel() * model.get_parameter(name).numel() for name in linear_weights(model))
    assert weight.get_total_flops() == products > 0
    assert backward_input.get_total_flops() + products == whole


class Steps(TorchDispatchMode):
    """Products, by the number of their result's elements, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name:
            self.steps += [step for step in ("all_reduce", "all_gather", "reduce_scatter", "wait") if step in name]
        elif "mm" in name:
            self.steps.append(prod(result.shape))
        return result


N, M, K, ROWS = 6, 10, 4, 24


@contextmanager
def fake_ranks(size: int) -> Iterator[TensorGroup]:
    """Communicators that move nothing: gloo's threads let go of tensors some time after they are done with them."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        group = TensorGroup.of(dist.group.WORLD)
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def steps(group: TensorGroup, sequence_parallel: bool) -> tuple[list[int | str], list[int | str]]:
    """Of backward-input and of the weight action, for a column-parallel product, a plain one, two column-parallel."""
    work = DeferredWork()
    x = torch.ones(ROWS // (group.size if sequence_parallel else 1), K, dtype=torch.float64, requires_grad=True)
    shapes = (N, K), (K, N), (K, K), (M, K)
    weights = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    y = x
    for weight in weights:
        main_grad = torch.zeros_like(weight, requires_grad=False)
        column: dict[str, Any] = (
            {} if weight is weights[1] else {"group": group, "sequence_parallel": sequence_parallel}
        )
        y = y if weight is weights[1] else y[: len(x)]
        y = linear(y, weight, main_grad=main_grad, deferred=work, **column)
    with Steps() as backward_input, work.collecting():
        y.sum().backward()
    with Steps() as weight_action:
        work.run_next()
    return backward_input.steps, weight_action.steps


def test_inputs_are_gathered_by_the_weight_action_alone_and_one_gather_ahead() -> None:
    """As many collectives as without: each gradient of an input is summed once, each input gathered once."""
    with fake_ranks(2) as group:
        backward_input, weight = steps(group, True)
        summed = ["reduce_scatter", "wait"]
        assert backward_input == [*[ROWS * K, *summed] * 2, ROWS * N, ROWS * K, *summed]
        last = ["all_gather", "all_gather", "wait", M * K]
        assert weight == [*last, "all_gather", "wait", K * K, K * N, "wait", N * K]

        backward_input, weight = steps(group, False)
        summed = ["all_reduce", "wait"]
        assert backward_input == [*[ROWS * K, *summed] * 2, ROWS * N, ROWS * K, *summed]
        assert weight == [M * K, K * K, K * N, N * K]


# --- memory ----------------------------------------------------------------------------------------------------------


def held_bytes(group: TensorGroup | None) -> list[int]:
    """After each of three backward-inputs and then of three weight actions, of two products with functions between."""
    size = 1 if group is None else group.size
    work = DeferredWork()
    weights = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in ((N, K), (K, N))]
    main_grads = [torch.zeros_like(weight, requires_grad=False) for weight in weights]
    held = []
    with LiveBytes([*weights, *main_grads]) as live:
        for _ in range(3):
            x = torch.ones(ROWS // size, K, dtype=torch.float64, requires_grad=True)
            y = linear(x, weights[0], group=group, sequence_parallel=size > 1, main_grad=main_grads[0], deferred=work)
            y = linear(y.exp().relu().exp(), weights[1], main_grad=main_grads[1], deferred=work)
            gradient = torch.ones(ROWS, K, dtype=torch.float64)
            with work.collecting():
                y.backward(gradient)
            del x, y, gradient
            held.append(live.now())
        for _ in range(3):
            work.run_next()
            held.append(live.now())
    return held


COLUMN = 8 * ROWS  # bytes


def test_what_waits_is_each_products_input_and_output_gradient_and_nothing_of_the_graph() -> None:
    one = (K + N + N + K) * COLUMN
    assert held_bytes(None) == [one, 2 * one, 3 * one, 2 * one, one, 0]


def test_under_sequence_parallelism_the_ranks_part_of_the_input_waits() -> None:
    one = (K // 2 + N + N + K) * COLUMN
    with fake_ranks(2) as group:
        assert held_bytes(group) == [one, 2 * one, 3 * one, 2 * one, one, 0]


def test_what_is_done_is_free_before_the_next_product() -> None:
    work, kept = DeferredWork(), []

    class Product:
        def __init__(self) -> None:
            self.alive = weakref.ref(self)

        def run(self) -> None:
            kept.append([reference() is not None for reference in references])

    with work.collecting():
        references = []
        for _ in range(3):
            product = Product()
            references.append(product.alive)
            work.put(product.run)
        del product
    work.run_next()
    assert kept == [[True, True, True], [False, True, True], [False, False, True]]


# --- when ------------------------------------------------------------------------------------------------------------


def test_microbatches_are_done_one_at_a_time_in_the_order_of_their_backward() -> None:
    work, done = DeferredWork(), []
    for microbatch in range(3):
        with work.collecting():
            for product in range(2):
                work.put(lambda at=(microbatch, product): done.append(at))  # type: ignore[misc]
    for microbatch in range(3):
        assert len(work) == 3 - microbatch
        work.run_next()
        assert done == [(at, product) for at in range(microbatch + 1) for product in range(2)]


def test_what_has_no_main_grad_and_what_needs_no_gradient_is_not_put_off() -> None:
    work = DeferredWork()
    x = torch.ones(ROWS, K, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(N, K, dtype=torch.float64, requires_grad=True)
    main_grad = torch.zeros_like(weight, requires_grad=False)
    with work.collecting():
        linear(x, weight, deferred=work).sum().backward()
        linear(x, weight.detach(), main_grad=main_grad, deferred=work).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, ROWS))
    work.run_next()
    assert not main_grad.any()


def test_compiled_blocks_put_nothing_off() -> None:
    """Their backward is one graph, in which nothing asks whether it is collected."""
    config = small()
    for compiled in (False, True):
        model = gpt(config, dtype=torch.float64, device=CPU, seed=1, compile=compiled)
        layers = [layer for layer in model.modules() if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))]
        assert [layer.place.deferred for layer in layers] == [None if compiled else model.deferred] * 8
