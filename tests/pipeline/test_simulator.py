"""The simulator's bubbles are those of the papers, and times are those by hand (of every shape: test_checker.py)."""

import pytest

from megalite.pipeline.simulator import equal_durations, simulate
from megalite.plan.timeline import FORWARD_PASSES, simulated
from tests.pipeline.shapes import parse, schedule


@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b_is_of_their_papers(name: str, pp: int) -> None:
    for microbatches in (1, 2, pp, 3 * pp + 1):
        assert simulated(schedule(name, pp, microbatches)).bubble == pytest.approx((pp - 1) / microbatches)


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("vpp", range(2, 5))
def test_bubble_of_interleaved_is_divided_by_the_chunks(vpp: int, pp: int) -> None:
    for microbatches, group in ((pp, None), (3 * pp, None), (2 * pp + 1, pp + 1), (pp + 3, None), (pp + 1, pp + 1)):
        table = schedule("interleaved", pp, microbatches, vpp, group)
        assert simulated(table).bubble == pytest.approx((pp - 1) / (vpp * microbatches))


@pytest.mark.parametrize("pp", range(1, 9))
def test_bubble_of_zb_h1_is_forward_plus_input_minus_weight_for_each_rank_but_one(pp: int) -> None:
    for forward, of_input, weight in ((1, 1, 1), (2, 3, 2), (4, 4, 3)):
        for microbatches in (pp, 2 * pp + 1):
            split, times = schedule("zb-h1", pp, microbatches), {"forward": forward, "backward-input": of_input}
            bubble = simulated(split, {key: times.get(key[2], weight) for key in equal_durations(split)}).bubble
            lost = (pp - 1) * (forward + of_input - weight)
            assert bubble == pytest.approx(lost / (microbatches * (forward + of_input + weight)))
            if forward == of_input == weight:
                assert bubble == pytest.approx(simulated(schedule("1f1b", pp, microbatches)).bubble / 3)


def test_two_microbatches_on_two_ranks_by_hand() -> None:
    line = simulated(schedule("1f1b", 2, 2))
    times = [[(str(action), start, end) for action, start, end in spans] for spans in line.ranks]
    assert times == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("0F0", 1, 2), ("0B0", 2, 4), ("0F1", 4, 5), ("0B1", 5, 7)],
    ]
    assert (line.makespan, line.bubble) == (9, 0.5)
    assert line.summary(FORWARD_PASSES).startswith("step 9 forward passes of a rank; idle 33.3% of it")


def test_transfers_and_uneven_stages_take_their_time() -> None:
    table = parse("0F0 0B0\n0F0 0B0")
    durations = {**equal_durations(table), (1, 0, "forward"): 5.0}
    first, last = simulate(table, durations, transfer=0.5)
    assert [(start, end) for _, start, end in last] == [(1.5, 6.5), (6.5, 8.5)]
    assert [(start, end) for _, start, end in first] == [(0, 1), (9, 11)]


def test_actions_that_wait_for_each_other_are_not_simulated() -> None:
    table = parse("0F0 0B0 0F1 0B1\n0F0 0F1 0B0 0B1")
    assert [len(spans) for spans in simulate(table, equal_durations(table))] == [1, 1]
