"""A layout whose every layer waits for the network is pointed out."""

from megalite.launch.context import ParallelContext
from megalite.launch.hosts import crossing, slow_tensor_parallelism
from megalite.layout.ranks import ParallelLayout
from tests.ranks import run_ranks


def test_groups_inside_machines_are_fine() -> None:
    assert crossing([[0, 1], [2, 3]], ["a", "a", "b", "b"]) is None


def test_groups_across_machines_are_named() -> None:
    warning = crossing(ParallelLayout(tp=4, dp=2).groups("tp"), ["a", "a", "a", "a", "b", "b", "c", "c"])
    assert warning is not None
    assert "1 of 2 tensor-parallel groups cross machines (ranks 4, 5, 6, 7 on b and c)" in warning
    assert "parallel.tp at 2 or less" in warning


def test_an_order_that_puts_tp_outside_is_named() -> None:
    layout = ParallelLayout(tp=2, dp=2, order="dp-tp")
    assert "2 of 2" in str(crossing(layout.groups("tp"), ["a", "a", "b", "b"]))


def test_ranks_of_one_machine_are_not_warned() -> None:
    assert run_ranks(slow_tensor_parallelism, 2, layout=ParallelLayout(tp=2)) == [None, None]
    assert slow_tensor_parallelism(ParallelContext()) is None
