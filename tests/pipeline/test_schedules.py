"""The schedules are those of the papers and of Megatron-LM: orders, warm-up counts, what is held."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.rules import schedule_flaws
from megalite.config.schedule_request import ScheduleRequest
from megalite.pipeline.actions import Schedule, in_flight, parse_action
from megalite.pipeline.schedules import forward_only
from tests.pipeline.shapes import parse, schedule, text_of, training


def leading_forwards(schedule: Schedule) -> list[int]:
    """By rank: the warm-up, and the forward pass with which the first backward pass takes turns, if any is left."""
    return [len([*takewhile(lambda one: one.kind == "forward", actions)]) for actions in schedule.ranks]


@pytest.mark.parametrize("pp", range(1, 17))
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_warm_up_counts_of_1f1b_are_megatrons(name: str, pp: int) -> None:
    for microbatches in (1, 2, 3, pp, pp + 1, 2 * pp + 3):
        warm_up = [min(pp - rank - 1, microbatches) for rank in range(pp)]
        assert leading_forwards(schedule(name, pp, microbatches)) == [min(one + 1, microbatches) for one in warm_up]


@pytest.mark.parametrize("pp", range(2, 17))
@pytest.mark.parametrize("vpp", range(2, 5))
def test_warm_up_counts_of_interleaved_are_megatrons(vpp: int, pp: int) -> None:
    for microbatches, group in ((pp, pp), (3 * pp, pp), (2 * pp + 2, pp + 2), (2 * pp + 1, pp + 1), (pp + 3, pp + 3)):
        passes = microbatches * vpp
        warm_up = [min((pp - rank - 1) * 2 + (vpp - 1) * group, passes) for rank in range(pp)]
        table = schedule("interleaved", pp, microbatches, vpp, group)
        assert leading_forwards(table) == [min(one + 1, passes) for one in warm_up]


def test_the_last_group_of_microbatches_may_be_shorter() -> None:
    cells = text_of(schedule("interleaved", 2, 5, vpp=2, group_size=3))[0].split()
    assert " ".join(one for one in cells if "F" in one) == "0F0 0F1 0F2 1F0 1F1 1F2 0F3 0F4 1F3 1F4"
    assert " ".join(one for one in cells if "B" in one) == "1B0 1B1 1B2 0B0 0B1 0B2 1B3 1B4 0B3 0B4"


KNOWN = {
    "gpipe": ["0F0 0F1 0F2 0B0 0B1 0B2", "0F0 0F1 0F2 0B0 0B1 0B2"],
    "1f1b": ["0F0 0F1 0B0 0F2 0B1 0B2", "0F0 0B0 0F1 0B1 0F2 0B2"],
    "zb-h1": ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"],
}


@pytest.mark.parametrize("name", KNOWN)
def test_three_microbatches_on_two_ranks(name: str) -> None:
    """As text: a cell is chunk, letter, microbatch."""
    table = schedule(name, 2, 3)
    assert text_of(table) == KNOWN[name]
    assert parse("\n".join(KNOWN[name])).ranks == table.ranks


@pytest.mark.parametrize("cell", ["", "F3", "0F", "0X3", "0f3", "0F3 ", "-1F3"])
def test_what_is_no_action_is_refused(cell: str) -> None:
    with pytest.raises(ValueError, match="chunk, one of F B I W, microbatch: 0F3"):
        parse_action(cell)


@given(pp=st.integers(1, 8), microbatches=st.integers(1, 20))
def test_zb_h1_is_1f1b_with_the_weight_gradients_put_off_by_the_rank(pp: int, microbatches: int) -> None:
    plain, split = schedule("1f1b", pp, microbatches), schedule("zb-h1", pp, microbatches)
    for rank, actions in enumerate(split.ranks):
        others = [one._replace(kind="backward") if one.kind == "backward-input" else one for one in actions]
        assert [one for one in others if one.kind != "backward-weight"] == [*plain.ranks[rank]]
        waiting = 0
        for one in actions:
            waiting += (one.kind == "backward-input") - (one.kind == "backward-weight")
            assert waiting <= rank + 1
        assert in_flight(actions) <= min(pp, microbatches)


@given(training)
def test_no_rank_holds_more_than_its_first_forward_passes(table: Schedule) -> None:
    whole = [
        [one._replace(kind="backward") if one.kind == "backward-input" else one for one in its] for its in table.ranks
    ]
    held = [in_flight([one for one in its if one.kind != "backward-weight"]) for its in whole]
    assert held == leading_forwards(table)
    if table.name in ("1f1b", "zb-h1"):
        assert all(most <= table.pp - rank for rank, most in enumerate(held))


@given(pp=st.integers(1, 12), more=st.integers(0, 60))
def test_any_number_of_microbatches_from_pp_on_has_a_group_size(pp: int, more: int) -> None:
    size = ScheduleRequest("interleaved", pp, pp + more, vpp=2).group
    assert size == pp or (pp + more) % pp
    assert pp == 1 or not [*schedule_flaws(ScheduleRequest("interleaved", pp, pp + more, vpp=2, group_size=size))]


def test_evaluation_takes_any_number_of_microbatches_forward() -> None:
    assert text_of(forward_only(2, 1, 3)) == ["0F0 0F1 0F2"] * 2
    assert text_of(forward_only(2, 2, 3)) == ["0F0 0F1 1F0 1F1 0F2 1F2"] * 2
    assert text_of(forward_only(4, 2, 1)) == ["0F0 1F0"] * 4
