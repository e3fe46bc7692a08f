"""A timeline tells what ranks hold and how much of a step is idle. What a run records is read back as one."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.errors.problems import UserError
from megalite.pipeline.actions import Schedule, parse_action
from megalite.pipeline.simulator import Span, equal_durations
from megalite.plan.timeline import InFlight, Timeline, in_flight, read_recording, simulated
from megalite.train.history import PIPELINE
from tests.pipeline.shapes import schedule


def test_a_timeline_of_nothing_is_no_division_by_zero() -> None:
    line = Timeline("1f1b", 1, 0, ((), ()))
    assert (line.makespan, line.bubble, line.idle) == (0, 0, 0)
    assert Timeline("1f1b", 1, 1, ((Span(parse_action("0F0"), 0, 0),),)).bubble == 0


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
        ("", InFlight(0, 0, 0)),
        ("0F0 0B0 0F1 0B1", InFlight(1, 0, 1)),
        ("0F0 0F1 1F0 0B0 0F2", InFlight(3, 0, 3)),
        ("0F0 0I0 0F1 0I1 0W0 0W1", InFlight(1, 2, 2)),
        ("0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2", InFlight(2, 2, 2)),
    ],
)
def test_an_activation_is_held_from_its_forward_to_its_backward_pass(line: str, held: InFlight) -> None:
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
    write(tmp_path, *lines(10, timeline(schedule("1f1b", 2, 3))), *lines(20, timeline(later=1000)))
    assert read_recording(tmp_path) == (20, timeline())


def test_another_step_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, *lines(10, timeline()), *lines(20, timeline(schedule("1f1b", 2, 3))))
    assert read_recording(tmp_path, 10) == (10, timeline())


def test_of_a_step_that_was_done_again_the_last_lines_count(tmp_path: Path) -> None:
    slow = Timeline("interleaved", 2, 4, tuple(spans[:1] for spans in timeline().ranks))
    write(tmp_path, *lines(10, slow), *lines(10, timeline()))
    assert read_recording(tmp_path) == (10, timeline())


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_step_may_be_done_again_on_fewer_or_more_ranks(tmp_path: Path, pp: int) -> None:
    again = timeline(schedule("1f1b", pp, 3))
    write(tmp_path, *lines(10, timeline()), *lines(10, again))
    assert read_recording(tmp_path) == (10, again)


def test_lines_of_two_runs_are_never_one_step(tmp_path: Path) -> None:
    """Their clocks may be hours apart."""
    again = lines(10, timeline(later=1000))
    write(tmp_path, *lines(10, timeline()), again[0][:9] + "\n", again[1])
    assert read_recording(tmp_path) == (10, timeline())
    write(tmp_path, *lines(10, timeline()), again[0])
    assert read_recording(tmp_path) == (10, timeline())


def test_what_a_killed_run_left_half_is_passed_over(tmp_path: Path) -> None:
    first, second = lines(20, timeline())
    write(tmp_path, *lines(10, timeline()), first, second[: len(second) // 2])
    assert read_recording(tmp_path) == (10, timeline())


BROKEN: list[dict[str, Any]] = [
    {"pp": None},
    {"actions": [["0X0", 0, 1]]},
    {"actions": [["0F0", 0]]},
    {"actions": 3},
]


@pytest.mark.parametrize("change", BROKEN, ids=str)
def test_a_line_that_is_no_record_is_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    good = lines(10, timeline(schedule("1f1b", 1, 1)))
    bad = json.dumps({**json.loads(good[0]), "step": 20, **change}) + "\n"
    write(tmp_path, *good, bad, "[]\n", "null\n", "\n")
    assert read_recording(tmp_path)[0] == 10


def refusal(folder: Path, step: int | None = None) -> str:
    with pytest.raises(UserError) as refused:
        read_recording(folder, step, "--measured")
    return str(refused.value)


def test_a_folder_without_a_recorded_step_is_refused(tmp_path: Path) -> None:
    assert f"--measured='{tmp_path}': pipeline.jsonl cannot be read there: No such file" in refusal(tmp_path)
    assert "Not a directory" in refusal(write(tmp_path, "") / PIPELINE)
    assert "holds no step of which all ranks are recorded" in refusal(write(tmp_path, lines(10, timeline())[0]))
    (tmp_path / PIPELINE).write_bytes(b"\xff\x00\n")
    assert "holds no step" in refusal(tmp_path)


def test_a_step_that_is_not_recorded_is_refused_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, *(line for step in (10, 20, 30, 40) for line in lines(step, timeline())))
    assert "step 12 is not recorded\n      fix: step 10, or none for the last" in refusal(tmp_path, 12)
