"""Trackers never make training wait and never end it, whatever happens to them; TensorBoard's event files read back."""

import re
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config.schema import Config, LogConfig
from megalite.observe import trackers as module
from megalite.observe.trackers import Tracker, Trackers, open_tensorboard

PATIENCE_S = 30.0
SAMPLE = {"step": 3, "kind": "sample", "prompt": "# a\n* b", "text": " c"}


class Collector:
    """Collects what it is given; fails at steps in `bad`, and waits for `gate` if there is one."""

    def __init__(self, bad: tuple[int, ...] = (), gate: Event | None = None) -> None:
        self.bad, self.gate = bad, gate
        self.seen: list[Any] = []

    def __call__(self) -> Tracker:
        return self.add, "send --rest"

    def add(self, line: Mapping[str, Any]) -> None:
        if self.gate is not None:
            self.gate.wait(PATIENCE_S)
        if line["step"] in self.bad:
            raise RuntimeError("the network\nis gone")
        self.seen.append(line)


def run(notes: list[str], *lines: dict[str, Any], **openers: Any) -> None:
    """A run with these trackers and lines."""
    trackers = Trackers(openers, notes.append)
    for line in (*lines, END):
        trackers.add(line)


END: dict[str, Any] = {"step": 4, "kind": "finished", "status": 0}
RECORDS = [{"step": step} for step in range(1, 5)]


def test_everything_arrives_in_order_once_a_record_of_metrics_has_opened_the_trackers() -> None:
    """The end of a run waits for a tracker that is not open yet."""

    def open_slowly() -> Tracker:
        time.sleep(0.3)
        return slow()

    collector, slow, notes, opened = Collector(), Collector(), list[str](), list[int]()
    run(notes, RECORDS[0], SAMPLE, RECORDS[1], x=collector, y=lambda: None, z=open_slowly)
    run(notes, SAMPLE, x=lambda: opened.append(1))
    assert collector.seen == slow.seen == [RECORDS[0], SAMPLE, RECORDS[1], END]
    assert (notes, opened) == ([], [])


def test_a_tracker_that_fails_costs_one_warning_and_no_other_tracker() -> None:
    def fail() -> None:
        raise OSError("no room")

    collector, notes = Collector(bad=(1, 3)), list[str]()
    run(notes, *RECORDS, x=fail, y=collector)
    assert collector.seen == [RECORDS[1], RECORDS[3], END]
    assert sorted(notes) == [
        "x: warning: OSError: no room; the run itself is not affected",
        "y: warning: RuntimeError: the network is gone; the run itself is not affected",
    ]


@pytest.mark.parametrize("status", [0, 1])
def test_a_tracker_that_hangs_holds_nothing_up_and_still_learns_of_the_end(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FINISH_S" if status == 0 else "FAILED_S", 0.2)
    gate, notes = Event(), list[str]()
    collector = Collector(gate=gate)
    trackers = Trackers({"x": collector}, notes.append)
    begin = time.monotonic()
    for step in range(1000):
        trackers.add({"step": step})
    trackers.add(end := END | {"status": status})
    assert time.monotonic() - begin < 0.35
    gate.set()
    trackers._thread.join(PATIENCE_S)
    assert collector.seen[-1] == end
    late = r"x: not done at the end of the run, 1,000 records wait; the run folder .*; to send the rest: send --rest"
    assert len(notes) == 1
    assert re.fullmatch(late, notes[0])


def test_tensorboard_holds_every_number_and_samples_as_they_are(tmp_path: Path) -> None:
    """A resume replaces the steps after its checkpoint."""
    for step, loss in ((0, 1.0), (2, 2.0)):
        show, _ = open_tensorboard(tmp_path, step)
        for number in range(step + 1, 5):
            sizes = {"update_rms": {"block_3": 0.5}, "layer_attention_logit": {"0": 9.0}}
            show({"step": number, "loss": loss, "mfu": None, "time_split": {"data": 0.5}, **sizes})
            show({"step": number, "val_loss": 2.0, "validation": {"web": {"loss": 3.0, "bits_per_byte": None}}})
        show({"step": 4, "kind": "checkpoint", "bytes": 3})
        show(END)
    for record in (SAMPLE, END):
        open_tensorboard(tmp_path, 4)[0](record)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    names = ["loss", "time_split/data", "update_rms/block_3", "layer_attention_logit/0", "val_loss", "val_loss/web"]
    assert board.Tags()["scalars"] == names
    assert [event.value for event in board.Scalars("val_loss/web")] == [3.0] * 4
    (name,) = board.Tags()["tensors"]
    (event,) = board.Tensors(name)
    assert event.step == 3
    assert event.tensor_proto.string_val == [b"    # a\n    * b c"]


def test_trackio_holds_all_starts_of_a_run_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real package, which no pinned environment of ours holds: it wants an older pillow than TensorBoard's."""
    pytest.importorskip("trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)  # read when it was imported
    storage = import_module("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)
    config = Config(run_name="mine", log=LogConfig(trackio=True, trackio_project="ours", wandb="disabled"))
    for start in range(2):
        notes = list[str]()
        trackers = module.open_trackers(config, tmp_path / "run", 2 * start, notes.append)
        for step in (2 * start + 1, 2 * start + 2):
            trackers.add({"step": step, "loss": 1.0 / step, "mfu": None, "time_split": {"data": 0.5}})
        trackers.add({"step": step, "val_loss": 0.75})
        trackers.add({"step": step, "kind": "finished", "status": 0})
        assert notes == []
    logged = [
        {name: it for name, it in line.items() if name != "timestamp"}
        for line in storage.SQLiteStorage.get_logs("ours", "mine")
    ]
    steps = [{"step": step, "loss": 1.0 / step, "time_split/data": 0.5} for step in range(1, 5)]
    assert logged == [*steps[:2], {"step": 2, "val_loss": 0.75}, *steps[2:], {"step": 4, "val_loss": 0.75}]
    assert storage.SQLiteStorage.get_run_config("ours", "mine")["train"]["steps"] == config.train.steps
    assert capsys.readouterr().out == ""
