"""Both ranks of a transfer issue it in one order, early, and wait for it once; that never costs the schedule time."""

from collections import Counter

import pytest
from hypothesis import given

from megalite.pipeline.actions import Action, Schedule
from megalite.pipeline.schedules import forward_only
from megalite.pipeline.simulator import Span, equal_durations, simulate
from megalite.pipeline.transfers import Transfer, Wait, instructions, transfer_of
from tests.pipeline.rehearsal import rehearse
from tests.pipeline.shapes import schedule, schedules


@given(schedules)
def test_a_rank_performs_its_actions_in_order_and_each_transfer_around_them(table: Schedule) -> None:
    for rank, program in enumerate(instructions(table)):
        assert tuple(record for record in program if isinstance(record, Action)) == table.ranks[rank]
        place = {record: at for at, record in enumerate(program)}
        assert len(place) == len(program)  # nothing twice
        awaited = {record.transfer for record in program if isinstance(record, Wait)}
        assert awaited == {record for record in program if isinstance(record, Transfer)}
        for action in table.ranks[rank]:
            if (receive := transfer_of("receive", table, rank, action)) is not None:
                assert place[receive] < place[Wait(receive)] == place[action] - 1
            if (send := transfer_of("send", table, rank, action)) is not None:
                assert place[action] < place[send] < place[Wait(send)]


@given(schedules)
def test_both_ranks_issue_what_is_between_them_in_one_order(table: Schedule) -> None:
    issued = [[record for record in program if isinstance(record, Transfer)] for program in instructions(table)]
    for rank, mine in enumerate(issued):
        for direction in ("forward", "backward"):
            for peer in {transfer.peer for transfer in mine}:
                sends = [one.tensor_id for one in mine if one[:3] == ("send", direction, peer)]
                receives = [one.tensor_id for one in issued[peer] if one[:3] == ("receive", direction, rank)]
                assert sends == receives
    numbers = Counter((one.role, one.tensor_id) for mine in issued for one in mine)
    assert set(numbers.values()) <= {1}


@given(schedules)
def test_of_what_was_sent_one_output_is_kept_besides_the_newest(table: Schedule) -> None:
    for program in instructions(table):
        kept: Counter[str] = Counter()
        for record in program:
            if isinstance(record, Transfer) and record.role == "send":
                kept[record.direction] += 1
                assert kept[record.direction] == 1
            elif isinstance(record, Wait) and record.transfer.role == "send":
                kept[record.transfer.direction] -= 1


def test_activations_go_on_to_the_next_rank_and_from_the_last_to_the_first() -> None:
    table = schedule("interleaved", 4, 4, vpp=2)
    last = transfer_of("send", table, 3, Action("forward", 0, 2))
    first = transfer_of("receive", table, 0, Action("forward", 1, 2))
    assert last == Transfer("send", "forward", 0, 0, 2, first.tensor_id)
    assert first == Transfer("receive", "forward", 3, 1, 2, last.tensor_id)
    assert transfer_of("send", table, 3, Action("forward", 1, 2)) is None  # the loss is there
    assert transfer_of("receive", table, 0, Action("forward", 0, 2)) is None


def end(ranks: tuple[tuple[Span, ...], ...]) -> float:
    return max(spans[-1].end for spans in ranks)


SHAPES = [
    schedule("1f1b", 8, 32),
    schedule("gpipe", 4, 8),
    schedule("zb-h1", 8, 16),
    schedule("interleaved", 4, 8, vpp=2),
    schedule("interleaved", 8, 32, vpp=4),
    schedule("interleaved", 4, 11, vpp=2, group_size=7),
    forward_only(4, 2, 8),
]


@pytest.mark.parametrize("table", SHAPES, ids=lambda table: f"{table.name}-{table.microbatches}")
def test_the_order_of_transfers_costs_nothing_or_with_uneven_stages_two_percent(table: Schedule) -> None:
    """Of forward passes alone, in evaluation, 3.3 %."""
    equal = equal_durations(table)
    assert end(rehearse(instructions(table), equal, transfer=0.125)[0]) == end(simulate(table, equal, transfer=0.125))
    uneven = {
        (rank, chunk, kind): time * (1 + 0.2 * ((7 * rank + 3 * chunk) % 5 - 2) / 2)  # up to 20% more or less
        for (rank, chunk, kind), time in equal_durations(table).items()
    }
    most = 1.035 if table.name == "forward-only" else 1.02
    played = end(rehearse(instructions(table), uneven, transfer=0.05)[0])
    assert played <= most * end(simulate(table, uneven, transfer=0.05))
