"""A timeline tells what ranks hold and how much of a step is idle. What a run records is read back as one."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.pipeline.actions import Schedule, in_flight, parse_action
from megalite.pipeline.simulator import Span, equal_durations
from megalite.plan.timeline import Timeline, read_recording, simulated
from megalite.train.history import PIPELINE
from tests.pipeline.shapes import schedule


def test_what_a_rank_holds_is_told_in_microbatches_of_all_its_layers() -> None:
    assert [simulated(schedule("1f1b", 2, 4)).held(rank) for rank in range(2)] == ["2 microbatches", "1 microbatch"]
    assert [simulated(schedule("interleaved", 4, 8, vpp=2)).held(rank) for rank in (0, 3)] == [
        "5.5 microbatches",
        "2.5 microbatches",
    ]
    assert simulated(schedule("interleaved", 4, 8, vpp=2)).title == "interleaved: pp 4, vpp 2, 8 microbatches"


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ("", 0),
        ("0F0 0B0 0F1 0B1", 1),
        ("0F0 0F1 1F0 0B0 0F2", 3),
        ("0F0 0I0 0F1 0I1 0W0 0W1", 2),
        ("0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2", 2),
    ],
)
def test_an_activation_is_held_from_its_forward_pass_to_the_last_backward_that_needs_it(line: str, held: int) -> None:
    assert in_flight([parse_action(cell) for cell in line.split()]) == held


TABLE = schedule("interleaved", 2, 4, vpp=2)


def timeline(table: Schedule = TABLE, later: float = 0) -> Timeline:
    line = simulated(table, {key: time * 0.25 for key, time in equal_durations(table).items()})
    ranks = tuple(tuple(Span(one, start + later, end + later) for one, start, end in spans) for spans in line.ranks)
    return Timeline(line.name, line.vpp, line.microbatches, ranks)


def lines(step: int, line: Timeline) -> list[str]:
    plain = [[(str(action), start, end) for action, start, end in spans] for spans in line.ranks]
    about = {"step": step, "schedule": line.name, "pp": line.pp}
    return [json.dumps({**about, "rank": rank, "actions": spans}) + "\n" for rank, spans in enumerate(plain)]


def write(folder: Path, *parts: str) -> Path:
    (folder / PIPELINE).write_text("".join(parts))
    return folder


def test_the_last_step_is_read_with_its_clock_set_to_zero(tmp_path: Path) -> None:
    assert read_recording(tmp_path) is None
    write(tmp_path, lines(10, timeline())[0])
    assert read_recording(tmp_path) is None
    write(tmp_path, *lines(10, timeline(schedule("1f1b", 2, 3))), *lines(20, timeline(later=1000)))
    assert read_recording(tmp_path) == (20, timeline())


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_step_may_be_done_again_on_fewer_or_more_ranks_and_its_last_lines_count(tmp_path: Path, pp: int) -> None:
    again = timeline(schedule("1f1b", pp, 3))
    write(tmp_path, *lines(10, timeline()), *lines(10, again))
    assert read_recording(tmp_path) == (10, again)


@pytest.mark.parametrize("change", [{"pp": None}, {"actions": [["0X0", 0, 1]]}, {"actions": [["0F0", 0]]}], ids=str)
def test_a_step_that_is_not_whole_is_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    """A killed run left a part of it, or a line is no record."""
    first, second = lines(20, timeline())
    bad = json.dumps({**json.loads(first), **change}) + "\n"
    for its in ((first, second[: len(second) // 2]), (bad, second)):
        write(tmp_path, *lines(10, timeline()), *its, "[]\n", "null\n", "\n")
        assert read_recording(tmp_path) == (10, timeline())
