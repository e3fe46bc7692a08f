"""report.html appears whole or not at all, costs a run little, never ends it; the command refuses what is no run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import megalite.observe.report.page as page_module
from megalite.errors.problems import UserError
from megalite.observe.report.page import SHARE, live_report, write_report
from megalite.observe.run_data import read_run
from megalite.train.history import read_metrics
from tests.observe.report.runs import write_run

ROOT = Path(__file__).parents[3]
HEAD = '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
END = {"time": 2.0, "step": 41, "kind": "finished", "status": 0}
PAGE = HEAD + '<meta name="generator" content="megalite report"/>\n'


class Clock:
    """A time that passes when it is told to, and a drawing that takes some of it."""

    def __init__(self, patch: pytest.MonkeyPatch, *, drawing_s: float) -> None:
        self.now, self.drawn = 100.0, list[float]()

        def render(runs: object, *, live: bool) -> str:
            self.drawn.append(self.now)
            self.now += drawing_s
            return PAGE

        patch.setattr(page_module.time, "monotonic", lambda: self.now)
        patch.setattr(page_module, "render", render)


@pytest.mark.parametrize(("drawing_s", "apart"), [(0.01, 30.0), (0.2, 0.2 * SHARE)])
def test_a_report_is_drawn_no_more_often_than_asked_and_takes_a_small_share_of_the_time(
    drawing_s: float, apart: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, drawing_s=drawing_s)
    report = live_report(read_run(write_run(tmp_path / "run")), 30.0)
    while clock.now < 1000:
        report({"step": 1, "loss": 1.0})
        clock.now += 1
    gaps = [after - before for before, after in zip(clock.drawn, clock.drawn[1:], strict=False)]
    assert clock.drawn[0] == 100
    only_at_the_end, before = live_report(read_run(tmp_path / "run"), 0.0), len(clock.drawn)
    for record, drawn in (({"step": 1, "loss": 1.0}, 0), (END, 1)):
        only_at_the_end(record)
        assert len(clock.drawn) == before + drawn
    assert all(apart <= gap <= apart + 1.5 for gap in gaps)
    assert len(gaps) > 10


def test_where_a_page_cannot_be_written_the_one_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    report = live_report(read_run(run), 1.0)
    report({"step": 41, "loss": 1.0})
    before = (run / "report.html").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(page_module.files, "write_atomically", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left on device"):
            report(END)
    assert (run / "report.html").read_text() == before
    (run / "report.html").write_text("mine")
    with pytest.raises(OSError, match="holds something else than the report of a run"):
        report(END)
    assert (run / "report.html").read_text() == "mine"


def test_the_command_draws_one_run_and_compares_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is for its user alone, unless it is asked for elsewhere."""
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second", lr=0.5)
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    try:
        drawn = [write_report([first], None), write_report([first], Path("one.html"))]
    finally:
        os.umask(before)
    assert drawn == [first / "report.html", Path("one.html")]
    assert [path.stat().st_mode & 0o777 for path in drawn] == [0o600, 0o644]
    assert drawn[0].read_text() == drawn[1].read_text()
    assert write_report([first, second], None) == Path("comparison.html")
    assert "2 runs compared" in Path("comparison.html").read_text()


def test_curves_of_the_validation_loss_are_a_picture_of_their_own(tmp_path: Path) -> None:
    """Each point is where a linear scale of both axes has it."""
    runs = [write_run(tmp_path / f"lr{lr}", lr=lr, seed=seed) for seed, lr in enumerate((0.5, 0.25))]
    out = tmp_path / "loss.svg"
    assert write_report(runs, out) == write_report(runs, out) == out, "it replaces its own picture"
    drawn = out.read_text()
    assert re.findall(r'class="">(optimizer.*|lr.*)</text>', drawn) == ["lr=0.5", "lr=0.25"]
    lines = [line for line in re.findall(r'<path d="M(.*)" class="c\d line"', drawn) if "h24" not in line]
    found = [[tuple(map(float, point.split())) for point in line.split("L")] for line in lines]
    known = [
        [(record["step"], record["val_loss"]) for record in read_metrics(run / "metrics.jsonl") if "val_loss" in record]
        for run in runs
    ]
    assert [len(line) for line in found] == [len(line) for line in known] != [0, 0]
    for axis, sign in ((0, 1), (1, -1)):
        shown = [sign * point[axis] for line in found for point in line]
        value = [point[axis] for line in known for point in line]
        scale = (max(shown) - min(shown)) / (max(value) - min(value))
        assert shown == pytest.approx([min(shown) + scale * (one - min(value)) for one in value], abs=0.02)


def test_a_run_that_is_named_twice_has_two_curves(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "loss.svg"
    drawn = write_report([run, run], out).read_text()
    assert re.findall(r'class="">(.*)</text>', drawn) == ["run", "run"]
    first, second = (line for line in re.findall(r'<path d="(M.*)" class="c\d line"', drawn) if "h24" not in line)
    assert first == second


def test_a_run_without_a_loss_has_no_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    assert "no loss is recorded" in refused([run], tmp_path / "loss.svg")
    assert not (tmp_path / "loss.svg").exists()


def refused(folders: list[Path], out: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        write_report(folders, out)
    return str(error.value)


def test_what_is_no_run_is_refused_all_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("")
    message = refused([run, tmp_path / "no-such", empty, file])
    assert "3 problems" in message
    assert message.count("there is no config.yaml") == 3
    assert "is no regular file, and is not replaced" in refused([run], tmp_path)
    assert "holds something else than" in refused([run], run / "metrics.jsonl")
    assert "cannot be written" in refused([run], Path("/proc/report.html"))
    assert "No such file or directory" in refused([run], tmp_path / "missing" / "out.html")
    (run / "config.yaml").write_text("a: [")
    assert f"{run / 'config.yaml'}: cannot be read" in refused([run])
    (run / "config.yaml").write_text("- a list")
    assert f"{run / 'config.yaml'}: holds no settings" in refused([run])
    assert [path.name for path in tmp_path.rglob("*.html*")] == []


def test_the_command_needs_no_torch_and_has_the_exit_statuses_of_all(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('megalite', run_name='__main__')"
    done, bad = (
        subprocess.run([sys.executable, "-c", code, "report", str(folder)], capture_output=True, text=True, check=False)
        for folder in (run, tmp_path)
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(run / "report.html")), done.stderr
    assert bad.returncode == 2
    assert "megalite: refused, 1 problem" in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize("value", ["NaN", "-1", "null", "[]", None], ids=str)
def test_no_value_of_a_line_ends_the_report(tmp_path: Path, value: str | None) -> None:
    """Each value of the last line of its kind is replaced, or left out (None)."""
    events = [
        {"time": 2.0, "step": 3, "kind": "skipped", "loss": 1.0, "grad_norm": 1.0, "loss_scale": 2.0},
        {"time": 2.0, "step": 3, "kind": "straggler", "rank": 0, "host": "n", "times": 1.5, "share": 0.2},
        {"time": 2.0, "step": 3, "kind": "profile", "folder": "x"},
        {"time": 2.0, "step": 3, "kind": "ranks", "memory_gib": [1.0], "compute_s": [1.0]},
        {"time": 2.0, "step": 4, "kind": "checkpoint", "bytes": 1, "seconds": 1.0, "stall_s": 1.0},
        {"time": 3.0, "step": 4, "kind": "finished", "status": 0},
    ]
    run = write_run(tmp_path / "run", steps=4, events=events)
    for name in ("metrics.jsonl", "events.jsonl"):
        whole = (run / name).read_text()
        lines = whole.splitlines()
        newest = {(line.get("kind"), "val_loss" in line): at for at, line in enumerate(map(json.loads, lines))}
        for at in newest.values():
            record = json.loads(lines[at])
            for group in (record, *(inner for inner in record.values() if isinstance(inner, dict))):
                for key, kept in [*group.items()]:
                    group[key] = "@"
                    if value is None:
                        del group[key]
                    line = json.dumps(record).replace('"@"', str(value))
                    group[key] = kept
                    (run / name).write_text("\n".join([*lines[:at], line, *lines[at + 1 :], ""]))
                    assert write_report([run], None).exists(), line
        (run / name).write_text(whole)


def test_a_report_says_what_it_leaves_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    by_step = [line for line in lines if '"val_loss"' not in line]
    repeated = [json.dumps({**json.loads(by_step[1]), "loss": 7.0}), by_step[0]]
    content = "\n".join([*by_step[2:], *by_step[:2], '{"step": 9, "loss": 1e400}', *repeated]).encode()
    (run / "metrics.jsonl").write_bytes(content + b'\n{"step": 10, "loss": 1.0, "\xff": 1}\n{"step": 11, "lo')
    with (run / "events.jsonl").open("a") as file:
        file.write('[1, 2]\n{"step": 41, "ki')
    data = read_run(run)
    assert data.damage == [
        f"{run / 'metrics.jsonl'}: no valid record in line 5, 8; left out",
        "metrics.jsonl: lines repeat steps or are not in order; the last line of each step is shown",
        f"{run / 'events.jsonl'}: no valid record in line 2; left out",
    ]
    assert [point[:2] for point in data.series["loss"].points()][:2] == [[1, json.loads(by_step[0])["loss"]], [2, 7.0]]
    page = write_report([run], None).read_text()
    assert all(text in page for text in data.damage)
