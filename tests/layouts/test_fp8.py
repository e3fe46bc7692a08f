"""Rounding to fp8 knows no layout: in fp64, where a CPU's products of rounded numbers are exact, other ranks, schedules
and recomputation change nothing, and tensor parallelism changes only which numbers share a scale."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.optim.gradients import norm_of
from megalite.tensor_parallel import linear as module
from tests.layouts.matrix import FOUR, FULL, SELECTIVE, Row, Workplace, assert_equal, row, rows_of, train_row
from tests.layouts.training import Trace, assembled, assert_same_training, merged, train
from tests.model.small import gpt, loss_and_gradients, perturbed, random_batch, small

RECIPES = ("tensorwise", "rowwise")
EXPERTS = {"model": {"moe": {"num_experts": 4, "top_k": 2, "num_shared_experts": 1}}}


def fp8(recipe: str | None, *, weights: bool = False) -> dict[str, dict[str, Any]]:
    return {"train": {"fp8": recipe, "fp8_weight_gradients": weights}}


def rows(recipe: str) -> list[Row]:
    """Of layouts that keep each token's numbers, and each weight's, together: rowwise scales are the same ones."""
    return [
        row("gpt2", FOUR, fp8(recipe), pp=2, schedule="zb-h1"),  # tied embeddings
        row("llama", FOUR, merged(fp8(recipe), FULL), dp=2),
        row("qwen3", FOUR, merged(fp8(recipe), SELECTIVE), pp=2, vpp=2),
    ]


WEIGHTS = fp8("rowwise", weights=True)
LONG_ROWS = [
    row("gpt2", FOUR, WEIGHTS, pp=2, schedule="zb-h1"),
    row("llama", FOUR, {"train": {"fp8": "rowwise", "compile": True}}),
    row("llama", merged(FOUR, EXPERTS), fp8("rowwise"), dp=2, ep=2),
    row("llama", FOUR, fp8("rowwise"), cp=2),
]


@rows_of(rows("rowwise"), LONG_ROWS)
def test_replicas_and_stages_train_like_one_process(workplace: Workplace, row: Row) -> None:
    """And compiled blocks, and ranks with experts or parts of a sequence."""
    assert_equal(workplace, row)


HIDDEN, GATE_AND_UP = 32, 256  # each rank has all of the first width, half of a gate and of its up in the second
SPLIT = merged(FOUR, {"model": {"head_size": 16}})  # attention has 64 and 128: no width is both split and whole


def cut(x: Tensor, dim: int) -> list[Tensor]:
    """The parts of x that two tensor-parallel ranks have."""
    return [x.index_select(dim, places) for places in _places(x.shape[dim])]


def joined(parts: list[Tensor], dim: int) -> Tensor:
    whole = torch.cat(parts, dim)
    return whole.index_select(dim, _places(whole.shape[dim]).flatten().argsort())


def _places(width: int) -> Tensor:
    return torch.arange(width).view(2 if width == GATE_AND_UP else 1, 2, -1).transpose(0, 1).flatten(1)


def round_by_the_parts_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process multiplies in parts as two ranks do, each of which finds the scales of its own part."""
    forward, back, weights = module.fp8_linear, module.fp8_input_gradient, module.fp8_weight_gradient

    def parted_forward(x: Tensor, weight: Tensor, _bias: None, recipe: str) -> Tensor:
        if len(weight) == HIDDEN:
            return sum_of(forward(*pair, None, recipe) for pair in zip(cut(x, -1), cut(weight, 1), strict=True))
        return joined([forward(x, part, None, recipe) for part in cut(weight, 0)], -1)

    def parted_back(grad: Tensor, weight: Tensor, recipe: str) -> Tensor:
        if len(weight) == HIDDEN:
            return joined([back(grad, part, recipe) for part in cut(weight, 1)], -1)
        return sum_of(back(*pair, recipe) for pair in zip(cut(grad, -1), cut(weight, 0), strict=True))

    def parted_weights(grad: Tensor, x: Tensor, recipe: str) -> Tensor:
        if grad.shape[1] == HIDDEN:
            return joined([weights(grad, part, recipe) for part in cut(x, 1)], 1)
        return joined([weights(part, x, recipe) for part in cut(grad, 1)], 0)

    monkeypatch.setattr(module, "fp8_linear", parted_forward)
    monkeypatch.setattr(module, "fp8_input_gradient", parted_back)
    monkeypatch.setattr(module, "fp8_weight_gradient", parted_weights)


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_tensor_parallel_ranks_train_like_one_process_that_rounds_their_parts(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, recipe: str, sequence_parallel: bool, weights: bool
) -> None:
    """The scales of a whole give other numbers only where these are tiny beside the largest of a part: too few to move
    the first loss, yet enough to round other numbers of later layers and steps to the other side."""
    one_process = row("llama", SPLIT, fp8(recipe, weights=weights))
    found = train_row(workplace, replace(one_process, parallel={"tp": 2, "sequence_parallel": sequence_parallel}))
    whole, exact = one_process.reference(workplace), row("llama", SPLIT).reference(workplace)
    assert relative(whole.losses, exact.losses) > 1e-4, "fp8 changes the losses"
    for trace in found:
        assert relative(trace.losses[:1], whole.losses[:1]) < 1e-6
        assert relative(trace.grad_norms[:1], whole.grad_norms[:1]) < 1e-3
    replicated(found)
    round_by_the_parts_of_two_ranks(monkeypatch)
    (parted,) = train_row(workplace, one_process)
    assert_same_training(found, parted)


def relative(found: list[float], wanted: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))


def replicated(traces: list[Trace]) -> None:
    """Parameters that all ranks hold are the same bits on all."""
    first, *others = (assembled(trace.parameters) for trace in traces)
    whole = [name for name, tensor in first.items() if tensor.isfinite().all()]
    assert any("norm" in name for name in whole)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in whole)


def counted(monkeypatch: pytest.MonkeyPatch, model: Any, **settings: Any) -> list[int]:
    """Products of fp8 numbers: outputs, gradients of inputs, gradients of weights."""
    calls: list[str] = []
    names = ("fp8_linear", "fp8_input_gradient", "fp8_weight_gradient")
    for name in names:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *inputs, name=name, real=real: (calls.append(name), real(*inputs))[1])
    built = gpt(model, **settings)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = random_batch(model)
    built.loss(batch, torch.tensor(1.0, dtype=torch.float64)).backward()
    return [calls.count(name) for name in names]


def test_the_first_and_last_block_and_the_head_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products in each of the other blocks, also where a stage has some of them."""
    model = small(num_layers=5)
    assert counted(monkeypatch, model, fp8="rowwise") == [3 * 4, 3 * 4, 0]
    assert counted(monkeypatch, model, fp8="rowwise", fp8_weight_gradients=True) == [3 * 4, 3 * 4, 3 * 4]
    assert counted(monkeypatch, model) == [0, 0, 0]
    assert counted(monkeypatch, small(num_layers=3, tie_embeddings=False), fp8="tensorwise") == [4, 4, 0]


def _unscaled(context: ParallelContext, config: Any) -> Trace:
    real = module.fp8_input_gradient
    module.fp8_input_gradient = lambda grad, weight, recipe: real(grad * (1 + context.rank), weight, recipe)
    return train(context, config)


def test_a_rank_that_scales_otherwise_is_caught(workplace: Workplace) -> None:
    case = rows("rowwise")[1]
    with pytest.raises(AssertionError):
        assert_same_training(train_row(workplace, case, _unscaled), case.reference(workplace))


def _one_infinity(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
    """In the gradient of the output."""
    there = torch.zeros_like(output, dtype=torch.bool)
    there[2, 1, 3] = True
    output.register_hook(lambda grad: grad.masked_fill(there, torch.inf))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_infinity_in_a_middle_block_makes_loss_or_norm_not_finite(recipe: str, weights: bool) -> None:
    """Which is what a step is judged by."""
    for where in ("weight", "gradient"):
        model = perturbed(small(num_layers=3), dtype=torch.bfloat16, fp8=recipe, fp8_weight_gradients=weights)
        down = model.get_submodule("blocks.1.mlp.down")
        if where == "weight":
            with torch.no_grad():
                down.weight[3, 5] = float("inf")
        else:
            down.register_forward_hook(_one_infinity)
        loss, gradients = loss_and_gradients(model, random_batch(model.config))
        assert bool(loss.isfinite()) == (where == "gradient")
        assert not norm_of([gradient.float().flatten() for gradient in gradients.values()]).isfinite()
