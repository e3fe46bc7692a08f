"""The checker passes every schedule, and says of a wrong table on which rank, at which action and why it is wrong."""

import re
from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megalite.pipeline.actions import Action, Schedule, parse_action
from megalite.pipeline.checker import check
from megalite.pipeline.schedules import forward_only
from megalite.pipeline.simulator import equal_durations, simulate
from megalite.pipeline.transfers import Transfer, Wait, instructions
from tests.pipeline.rehearsal import Communicator, one_for_each_direction, rehearse
from tests.pipeline.shapes import parse, schedules, training

ORDER = "comes next: a chunk takes the microbatches in their order"


def stuck(table: Schedule, communicator: Communicator = one_for_each_direction) -> list[str]:
    """The ranks that never end where transfers are performed one after the other on such communicators."""
    return rehearse(instructions(table), equal_durations(table), communicator=communicator)[1]


@given(schedules)
def test_every_schedule_of_every_shape_passes_and_no_rank_ever_waits_for_the_order_of_transfers(
    table: Schedule,
) -> None:
    assert check(table) == []
    durations = equal_durations(table)
    assert rehearse(instructions(table), durations) == (simulate(table, durations), [])


@given(training, st.data())
def test_any_two_actions_swapped_are_rejected_unless_the_table_can_still_be_performed(
    table: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, table.pp - 1))
    actions = [*table.ranks[rank]]
    places = st.integers(0, len(actions) - 1)
    one, other = data.draw(places), data.draw(places)
    actions[one], actions[other] = actions[other], actions[one]
    changed = replace(table, ranks=(*table.ranks[:rank], tuple(actions), *table.ranks[rank + 1 :]))
    found = check(changed)
    assert bool(found) == (not sound(changed))
    assert found or not stuck(changed), "what the checker passes comes to its end"
    if found and "deadlock" not in found[0]:
        place = re.match(rf"rank {rank}(?:, action (\d+) .*|: ends before .*)", found[0])
        assert place is not None
        assert place[1] is None or int(place[1]) >= min(one, other), "an action that is not in place"


def sound(table: Schedule) -> bool:
    """By another way: the rules one by one, and whether any order of all actions gives each what it needs."""
    first = "backward-input" if table.name == "zb-h1" else "backward"
    kinds = ["forward", first, *(["backward-weight"] if table.name == "zb-h1" else [])]
    for actions in table.ranks:
        for chunk in range(table.vpp):
            at = [[actions.index(Action(kind, chunk, m)) for m in range(table.microbatches)] for kind in kinds]  # type: ignore[arg-type]
            if any(line != sorted(line) for line in at) or any(
                [*column] != sorted(column) for column in zip(*at, strict=True)
            ):
                return False
    sent: set[int] = set()
    left = [list(actions) for actions in table.ranks]
    went_on = True
    while went_on:
        went_on = False
        for rank, actions in enumerate(left):
            while actions and (table.tensor_id("receive", rank, actions[0]) in {None, *sent}):
                number = table.tensor_id("send", rank, actions.pop(0))
                sent |= set() if number is None else {number}
                went_on = True
    return not any(left)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F1 0F0 0B0 0B1", f"rank 0, action 0 (0F1): 0F0 {ORDER}"),
        ("0F0 0B1 0F1 0B0", f"rank 0, action 1 (0B1): 0B0 {ORDER}"),
        ("0B0 0F0 0F1 0B1", "rank 0, action 0 (0B0): comes before 0F0"),
        ("0F0 0F1 0B1 0B0", f"rank 0, action 2 (0B1): 0B0 {ORDER}"),
        ("0F0 0F1 0B0", "rank 0: ends before 0B1 and 0W1"),
        ("0F0 0F0 0B0 0F1 0B1", f"rank 0, action 1 (0F0): 0F1 {ORDER}"),
        ("0F0 0B0 0I0 0F1 0B1", f"rank 0, action 2 (0I0): 0B1 {ORDER}"),
        ("0F0 0W0 0I0 0F1 0B1", "rank 0, action 1 (0W0): comes before 0B0"),
        ("0F0 0F1 0I0 0I1 0W1", f"rank 0, action 4 (0W1): 0W0 {ORDER}"),
        ("0F0 0F1 0I0 0I1 0W0", "rank 0: ends before 0W1"),
        ("0F0 0I0 0B0 0F1 0B1", f"rank 0, action 2 (0B0): 0B1 {ORDER}"),
        ("0F0 0B0 0F1 1B1 0B1", "rank 0, action 3 (1B1): is not part of 2 microbatches through chunks 0 to 0"),
        ("0F0 0B0 0F1 0B1 0F2", "rank 0, action 4 (0F2): is not part of 2 microbatches through chunks 0 to 0"),
        ("", "rank 0: ends before 0F0"),
    ],
)
def test_what_is_wrong_with_one_rank_is_told(text: str, told: str) -> None:
    line = tuple(map(parse_action, text.split()))
    assert check(Schedule("custom", vpp=1, microbatches=2, ranks=(line,))) == [told]


def test_evaluation_has_no_backward_pass() -> None:
    table = forward_only(2, 1, 1)
    wrong = replace(table, ranks=((*table.ranks[0], Action("backward", 0, 0)), table.ranks[1]))
    assert check(wrong) == ["rank 1: ends before 0B0 and 0W0"]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    assert check(parse("0F0 0B0 0F1 0B1\n0F0 0F1 0B0 0B1")) == [
        "rank 0, action 1 (0B0): deadlock: what it is to receive is never sent",
        "rank 1, action 1 (0F1): deadlock: what it is to receive is never sent",
    ]


def one_for_all(rank: int, transfer: Transfer) -> Hashable:
    return "all"


def one_for_each_pair(rank: int, transfer: Transfer) -> Hashable:
    return frozenset({rank, transfer.peer})


@given(training)
def test_directions_that_share_a_communicator_hang_every_pipeline(table: Schedule) -> None:
    assume(table.pp > 1 and table.microbatches > 1 and table.name != "gpipe")
    for shared in (one_for_all, one_for_each_pair):
        assert stuck(table, shared)


@given(training, st.data())
def test_two_transfers_issued_in_another_order_than_their_peers_hang(table: Schedule, data: st.DataObject) -> None:
    """What an executor would do that walked its own order."""
    assume(table.pp > 1 and table.microbatches > 1)
    order = [*instructions(table)]
    rank = data.draw(st.integers(0, table.pp - 1))
    program = [*order[rank]]
    receives = [at for at, one in enumerate(program) if isinstance(one, Transfer) and one.role == "receive"]
    pairs = [(one, other) for one, other in pairwise(receives) if Wait(program[one]) not in program[:other]]
    pairs = [(one, other) for one, other in pairs if program[one].direction == program[other].direction]
    assume(pairs)
    first, second = data.draw(st.sampled_from(pairs))
    program[first], program[second] = program[second], program[first]
    order[rank] = tuple(program)
    assert rehearse(order, equal_durations(table))[1]
