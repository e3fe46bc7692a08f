"""A layout whose every layer waits for the network is pointed out."""

from megalite.launch.startup import slow_tensor_parallelism
from megalite.layout.ranks import ParallelLayout


def test_groups_inside_machines_are_fine() -> None:
    assert slow_tensor_parallelism([[0, 1], [2, 3]], ["a", "a", "b", "b"]) is None


def test_groups_across_machines_are_named() -> None:
    warning = slow_tensor_parallelism(ParallelLayout(tp=4, dp=2).groups("tp"), ["a", "a", "a", "a", "b", "b", "c", "c"])
    assert warning is not None
    assert "1 of 2 tensor-parallel groups cross machines (ranks 4, 5, 6, 7 on b and c)" in warning
    assert "parallel.tp at 2 or less" in warning


def test_an_order_that_puts_tp_outside_is_named() -> None:
    layout = ParallelLayout(tp=2, dp=2, order="dp-tp")
    assert "2 of 2" in str(slow_tensor_parallelism(layout.groups("tp"), ["a", "a", "b", "b"]))
