"""What goes to wandb is what the run's files hold, each step once and in order, whoever is faster."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.train import wandb_rows
from megalite.train.wandb_rows import Row, RowReader, flattened


def write(folder: Path, line: dict[str, Any]) -> None:
    name = "events.jsonl" if "kind" in line else "metrics.jsonl"
    with (folder / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def of_step(step: int) -> list[dict[str, Any]]:
    """What a run writes after one step, in its order."""
    lines: list[dict[str, Any]] = [{"step": step, "loss": 1.0 / step}] if step % 2 else []
    if step % 3 == 0:
        lines.append({"step": step, "val_loss": 2.0 / step})
    if step % 5 == 0:
        lines += [{"kind": "sample", "step": step, "prompt": prompt, "text": f"{step}"} for prompt in ("a", "b")]
    return [*lines, {"kind": "checkpoint", "step": step, "seconds": 0.1}]


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(1, 20), looks=st.sets(st.integers(0, 80)))
def test_every_step_is_given_out_once_in_order_and_whole(steps: int, looks: set[int]) -> None:
    lines = [line for step in range(1, steps + 1) for line in of_step(step)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reader, rows = RowReader(folder), list[Row]()
        for number, line in enumerate(lines):
            if number in looks:
                rows += reader.complete()
            write(folder, line)
        rows += reader.rest()
        assert rows == RowReader(folder).rest()
    assert [row.step for row in rows] == sorted({row.step for row in rows})
    said = [{"step": row.step, **row.values} for row in rows if row.values]
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "kind" not in line:
            merged.setdefault(line["step"], {}).update(line)
    assert said == list(merged.values())
    newest = max(merged)
    assert [row.step for row in rows if row.samples] == list(range(5, newest + 1, 5))
    assert all(row.samples == {"a": f"{row.step}", "b": f"{row.step}"} for row in rows if row.samples)


def test_a_step_waits_until_its_evaluation_cannot_come_any_more(tmp_path: Path) -> None:
    reader = RowReader(tmp_path)
    assert reader.complete() == []
    write(tmp_path, {"step": 1, "loss": 3.0})
    assert reader.complete() == []
    write(tmp_path, {"step": 1, "val_loss": 4.0})
    write(tmp_path, {"step": 2, "loss": 2.0})
    assert reader.complete() == [Row(1, {"loss": 3.0, "val_loss": 4.0})]
    assert reader.rest() == [Row(2, {"loss": 2.0})]


def test_a_sample_that_is_written_between_two_reads_is_not_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on after the first file is read and before the second one is."""
    reader, read = RowReader(tmp_path), wandb_rows._Tail.new_lines
    write(tmp_path, {"step": 5, "loss": 3.0})
    to_come = [{"kind": "sample", "step": 5, "prompt": "a", "text": "b"}, {"step": 6, "loss": 2.0}]

    def read_and_go_on(self: wandb_rows._Tail) -> list[dict[str, Any]]:
        lines = [*read(self)]
        while to_come:
            write(tmp_path, to_come.pop(0))
        return lines

    monkeypatch.setattr(wandb_rows._Tail, "new_lines", read_and_go_on)
    assert reader.complete() + reader.complete() == [Row(5, {"loss": 3.0}, {"a": "b"})]


def test_a_line_that_is_being_written_waits_and_one_that_was_torn_is_passed_over(tmp_path: Path) -> None:
    reader, path = RowReader(tmp_path), tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert reader.rest() == [Row(1, {"loss": 3.0})]
    with path.open("ab") as file:
        file.write(b'ss": 2.0}\n{"step": 3, "l\n[1]\n{"step": 4, "loss": 1.0}\n')
    assert reader.rest() == [Row(2, {"loss": 2.0}), Row(4, {"loss": 1.0})]


def test_a_sample_of_a_start_that_got_further_is_replaced_by_the_one_of_this_start(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "sample", "step": 5, "prompt": "a", "text": "then"})
    reader = RowReader(tmp_path)
    write(tmp_path, {"step": 4, "loss": 3.0})
    assert reader.rest() == [Row(4, {"loss": 3.0})]
    write(tmp_path, {"step": 5, "loss": 2.0})
    write(tmp_path, {"kind": "sample", "step": 5, "prompt": "a", "text": "now"})
    assert reader.rest() == [Row(5, {"loss": 2.0}, {"a": "now"})]


def test_nested_figures_are_sections_and_unknown_ones_are_left_out() -> None:
    values = {"loss": 1.0, "mfu": None, "time_split": {"data": 0.1, "other": None}}
    assert flattened(values) == {"loss": 1.0, "time_split/data": 0.1}
