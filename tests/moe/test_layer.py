"""A layer with experts is the loop over tokens and experts, in fp64: outputs, losses, figures and every gradient."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.moe.dispatch import ExpertRanks
from megalite.tensor_parallel.collectives import TensorGroup
from tests.moe.loop import Problem, Solution, assert_same, layer_of, slice_of, solution_of, solve
from tests.ranks import run_ranks

LOSSES = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
SIGMOID: dict[str, Any] = {"score": "sigmoid", **LOSSES}
GROUPS = {"num_groups": 4, "top_k_groups": 2, "top_k": 4}
OPTIONS: list[dict[str, Any]] = [
    {"aux_loss_coeff": 0.0},
    {"top_k": 1, **LOSSES},
    {"top_k": 3, **LOSSES},
    {"top_k": 8, **LOSSES},
    {"aux_loss": "sequence", **LOSSES},
    {"aux_loss": "global", **LOSSES},
    {"aux_loss": "global", **GROUPS, **LOSSES},
    {"pre_softmax": True, "scaling_factor": 2.5, **LOSSES},
    {"pre_softmax": True, "normalize_weights": False, **LOSSES},
    {"pre_softmax": True, "normalize_weights": False, "top_k": 1, **LOSSES},
    {**GROUPS, **LOSSES},
    {**SIGMOID},
    {**SIGMOID, "normalize_weights": False, "top_k": 3},
    {**SIGMOID, "top_k": 1, "scaling_factor": 2.5},
    {**SIGMOID, "expert_bias_rate": 0.1, "scaling_factor": 2.5},
    {**SIGMOID, "expert_bias_rate": 0.1, "aux_loss": "sequence", **GROUPS},
    {**SIGMOID, "expert_bias_rate": 0.1, "aux_loss": "global", "num_groups": 2, "top_k_groups": 1},
    {"capacity_factor": 0.5, **LOSSES},
    {"capacity_factor": 0.75, "top_k": 1, **LOSSES},  # all weights are 1: the earliest tokens stay
    {"capacity_factor": 1.0, "expert_bias_rate": 0.1, **SIGMOID},
]


def named(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items() if name not in LOSSES)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("settings", OPTIONS, ids=named)
def test_a_layer_is_the_loop(settings: dict[str, Any], activation: str) -> None:
    problem = Problem.drawn(settings, activation)
    expected = solve(problem)
    if problem.moe.capacity_factor is not None:
        assert expected.figures[2 * problem.moe.num_experts] > 2, "choices are dropped"
    assert_same(solution_of(layer_of(problem), problem), expected)
    assert_same(solution_of(layer_of(problem, recompute=True), problem), expected)


def test_groups_and_biases_change_the_choice() -> None:
    """Else the rows above prove nothing of them."""
    for settings in ({**GROUPS}, {**SIGMOID, "expert_bias_rate": 0.1}):
        problem, plain = Problem.drawn(settings), Problem.drawn({"top_k": settings.get("top_k", 2)})
        assert not torch.equal(solve(problem).figures[:8], solve(plain).figures[:8])


Change = Callable[[Problem, int], Problem]  # of a replica's problem


def as_drawn(problem: Problem, replica: int) -> Problem:
    return problem


def one_for_all(problem: Problem, replica: int) -> Problem:
    """All tokens choose expert 5 (and, taking three, experts 6 and 7): the rest have none."""
    router = torch.arange(8.0, dtype=torch.float64).sub(1).clamp(max=4).unsqueeze(1).expand(8, problem.x.shape[2])
    noise = 0.01 * problem.router
    if problem.moe.top_k == 1:
        router = torch.where(torch.arange(8).unsqueeze(1) == 5, 10.0, router)
    return replace(problem, x=problem.x.abs() + 0.1, router=router + noise)


def padding_on_replica_1(problem: Problem, replica: int) -> Problem:
    return replace(problem, mask=problem.mask & (replica != 1))


def only_replica_0(problem: Problem, replica: int) -> Problem:
    return one_for_all(replace(problem, mask=problem.mask & (replica == 0)), replica)


def _on_a_rank(
    context: ParallelContext, settings: dict[str, Any], dispatcher: str, change: Change
) -> tuple[Solution, Any]:
    """This rank's part of its replica's problem, and which experts it holds."""
    replica = context.index("dp")
    problem = change(Problem.drawn({**settings, "dispatcher": dispatcher}, seed=replica), replica)
    ranks = ExpertRanks.of(context)
    layer = layer_of(problem, ranks, recompute=context.layout.tp > 1)
    return solution_of(layer, problem, TensorGroup.of(context.group("tp"))), slice_of(ranks)


LAYOUTS = [
    ParallelLayout(dp=2, ep=2, etp=1),
    ParallelLayout(dp=2, etp=2),
    ParallelLayout(tp=2, ep=2, etp=1),
    ParallelLayout(tp=2, etp=2),
    ParallelLayout(tp=2, dp=2, ep=4, etp=1),
    ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    ParallelLayout(tp=2, dp=2, ep=2, etp=1),
    ParallelLayout(tp=2, dp=2, ep=2, etp=1, order="ep-tp-dp-pp"),
    ParallelLayout(dp=4, ep=2, etp=2),
    ParallelLayout(dp=4, ep=2, etp=1),
    ParallelLayout(tp=4, ep=1, etp=4),
    ParallelLayout(tp=4, ep=2, etp=2),
]
ON_RANKS: list[dict[str, Any]] = [
    {"top_k": 3, **LOSSES},
    {**SIGMOID, "expert_bias_rate": 0.1, "aux_loss": "sequence", **GROUPS},
    {"capacity_factor": 0.5, "aux_loss": "global", **LOSSES},
    {"capacity_factor": 0.75, "top_k": 1, **LOSSES},
]


def rows() -> list[Any]:
    """Every layout with every setting and both dispatchers; each of either at least once in a plain run."""
    found = []
    for (number, layout), (at, settings) in product(enumerate(LAYOUTS), enumerate(ON_RANKS)):
        for which, dispatcher in enumerate(("alltoall", "allgather")):
            usual = number in (2, 5, 6, 8) and at == (number + which) % 4
            found.append(pytest.param(layout, settings, dispatcher, marks=() if usual else pytest.mark.long))
    return found


@pytest.mark.parametrize(("layout", "settings", "dispatcher"), rows(), ids=str)
def test_ranks_together_are_the_loop(layout: ParallelLayout, settings: dict[str, Any], dispatcher: str) -> None:
    assert_ranks_are_the_loop(layout, settings, dispatcher, as_drawn)


TOP_1 = {"pre_softmax": True, "normalize_weights": False, "top_k": 1, **LOSSES}


@pytest.mark.parametrize("change", [one_for_all, padding_on_replica_1, only_replica_0])
@pytest.mark.parametrize("settings", [TOP_1, {**TOP_1, "top_k": 3}, {**TOP_1, "capacity_factor": 1.0}], ids=named)
def test_a_layer_is_the_loop_where_experts_have_no_token(settings: dict[str, Any], change: Change) -> None:
    """Their gradients are zero, not None."""
    problem = change(Problem.drawn(settings), 1)
    found = solution_of(layer_of(problem), problem)
    assert_same(found, solve(problem))
    assert not found.inner_grad[:5].any(), "no expert of these has a token"
    assert bool(found.inner_grad[5].any()) == (change is one_for_all), "replica 1 has tokens"


@pytest.mark.parametrize("change", [one_for_all, padding_on_replica_1, only_replica_0])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], pytest.param(LAYOUTS[4], marks=pytest.mark.long)], ids=str)
def test_ranks_are_the_loop_where_some_have_no_token(layout: ParallelLayout, dispatcher: str, change: Change) -> None:
    """None of their own, none for their experts, or neither."""
    assert_ranks_are_the_loop(layout, TOP_1, dispatcher, change)


def assert_ranks_are_the_loop(
    layout: ParallelLayout, settings: dict[str, Any], dispatcher: str, change: Change
) -> None:
    found = run_ranks(_on_a_rank, layout.world_size, settings, dispatcher, change, dtype=torch.float64, layout=layout)
    solutions = [solve(change(Problem.drawn(settings, seed=replica), replica)) for replica in range(layout.dp)]
    for replica, expected in enumerate(solutions):
        its = [rank for rank in range(layout.world_size) if layout.coordinates(rank)["dp"] == replica]
        of_tp = [found[rank][0] for rank in sorted(its, key=lambda rank: layout.coordinates(rank)["tp"])]
        for name in ("y", "x_grad"):
            close(name, torch.cat([getattr(one, name) for one in of_tp]), getattr(expected, name))
        for name in ("figures", "router_grad"):
            close(name, sum(getattr(one, name) for one in of_tp), getattr(expected, name))
    inner, down = (sum(getattr(one, name) for one in solutions) for name in ("inner_grad", "down_grad"))
    found_inner, found_down = torch.zeros_like(inner), torch.zeros_like(down)
    for its, (held, columns) in found:
        found_inner[held, :, columns] += its.inner_grad
        found_down[held, :, columns] += its.down_grad
    close("inner_grad", found_inner, inner)
    close("down_grad", found_down, down)


def close(name: str, found: Any, expected: Any) -> None:
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    assert difference <= 1e-12 * max(1.0, largest), f"{name}: {difference} of {largest}"
