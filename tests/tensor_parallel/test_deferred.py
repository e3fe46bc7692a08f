"""Weight gradients put off: backward-input computes none, the weight action all, to the same bits and in all the same
number of collectives (of operations: tests/pipeline/test_executor.py; on ranks that train: tests/layouts)."""

import weakref
from contextlib import nullcontext
from math import prod
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import GPT
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.linear import linear
from tests.model.small import ALL_DROPOUTS, CPU, FAMILIES, gpt, perturbed, random_batch, small, zero_main_grads
from tests.tensor_parallel.live_bytes import LiveBytes
from tests.tensor_parallel.operations import Operations, fake_rank

ALL_MODULES = ["attention", "norm", "activation"]
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective", "recompute_modules": ALL_MODULES},
    "full": {"recompute": "full"},
}
MICROBATCHES = 2
SCALE = torch.tensor(0.02, dtype=torch.float64)


def linear_layers(model: GPT) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """Whose weight gradients are put off."""
    layers = (ColumnParallelLinear, RowParallelLinear)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, layers)}


def gradients_of(family: str, *, put_off: bool, **settings: Any) -> dict[str, Tensor]:
    """Of several microbatches. Put off as zb-h1 does: some microbatches wait, and each is later done whole."""
    model = perturbed(small(**FAMILIES[family], **ALL_DROPOUTS, num_layers=2), **settings)
    main_grads = zero_main_grads(model)
    waiting = [f"{name}.weight" for name in linear_layers(model)]
    for sample in range(MICROBATCHES):
        before = {name: main_grads[name].clone() for name in waiting}
        loss = model.loss(random_batch(model.config, seed=sample, first_sample=sample), SCALE)
        with model.deferred.collecting() if put_off else nullcontext():
            loss.backward()
        unchanged = [torch.equal(main_grads[name], before[name]) for name in waiting]
        assert unchanged == [put_off] * len(waiting), "backward-input adds to no weight's main gradient"
        if put_off and sample > 0:
            model.deferred.run_next()
            assert all(not torch.equal(main_grads[name], before[name]) for name in waiting)
    assert len(model.deferred) == put_off
    if put_off:
        model.deferred.run_next()
    others = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert others.keys() <= {"embedding.position.weight"}
    return {**main_grads, **others}


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("family", FAMILIES)
def test_put_off_gradients_are_the_same_bits(family: str, recompute: dict[str, Any]) -> None:
    expected = gradients_of(family, put_off=False, **recompute)
    found = gradients_of(family, put_off=True, **recompute)
    assert found.keys() == expected.keys()
    assert [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []


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


N, M, K, ROWS = 6, 10, 4, 24


def step(name: str, args: Any, result: Any) -> int | str | None:
    """Of a product the number of its result's elements, of a collective its name."""
    if "mm" in name:
        return prod(result.shape)
    names = {"all_gather_into_tensor_out": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
    collectives = {"all_reduce": "all_reduce", "wait_tensor": "wait", **names}
    return collectives.get(name)


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
    with Operations(step) as backward_input, work.collecting():
        y.sum().backward()
    with Operations(step) as weight_action:
        work.run_next()
    return backward_input.noted, weight_action.noted


def fake_group() -> TensorGroup:
    group = TensorGroup.of(torch.distributed.group.WORLD)
    assert group is not None
    return group


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_inputs_are_gathered_by_the_weight_action_alone_and_one_gather_ahead(sequence_parallel: bool) -> None:
    """As many collectives as without: each gradient of an input is summed once, each input gathered once."""
    with fake_rank(ParallelLayout(tp=2)):
        backward_input, weight = steps(fake_group(), sequence_parallel)
    summed = ["reduce_scatter" if sequence_parallel else "all_reduce", "wait"]
    assert backward_input == [*[ROWS * K, *summed] * 2, ROWS * N, ROWS * K, *summed]
    gathered = ["all_gather", "all_gather", "wait", M * K, "all_gather", "wait", K * K, K * N, "wait", N * K]
    assert weight == (gathered if sequence_parallel else [M * K, K * K, K * N, N * K])


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
    """Under sequence parallelism the rank's part of the input."""
    one = (K + N + N + K) * COLUMN
    assert held_bytes(None) == [one, 2 * one, 3 * one, 2 * one, one, 0]
    one = (K // 2 + N + N + K) * COLUMN
    with fake_rank(ParallelLayout(tp=2)):
        assert held_bytes(fake_group()) == [one, 2 * one, 3 * one, 2 * one, one, 0]


class Product:
    """Notes its number in `done`, and which of all products are alive then."""

    alive: ClassVar[weakref.WeakSet["Product"]] = weakref.WeakSet()
    done: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive.add(self)

    def run(self) -> None:
        self.done.append((self.number, len(self.alive)))


def test_microbatches_are_done_one_at_a_time_in_order_and_what_is_done_is_free() -> None:
    work = DeferredWork()
    for microbatch in range(2):
        with work.collecting():
            for number in range(3):
                work.put(Product(3 * microbatch + number).run)
    for microbatch in range(2):
        assert len(work) == 2 - microbatch
        work.run_next()
        assert Product.done == [(number, 6 - number) for number in range(3 * microbatch + 3)]


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
        found = [layer.place.deferred for layer in linear_layers(model).values()]
        assert found == [None if compiled else model.deferred] * 8
