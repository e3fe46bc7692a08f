"""A run whose checkpoints are gone does not silently begin again; one that never saved does."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import pretrain_gpt
from megalite.config.files import OWN
from megalite.observe.report.page import write_report
from megalite.train.history import read_events
from tests.bad_input.launching import SMALL, TOKENS, copy_of_run, refused, tree, write_corpus

RUN = [*SMALL, *TOKENS, "run_dir=run", "checkpoint.interval=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its corpus."""
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert pretrain_gpt.main(RUN) == 0
    return folder


@pytest.fixture
def run(finished: Path, launch_folder: Path) -> Path:
    return copy_of_run(finished, launch_folder)


def lose(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def do_not_mount(run: Path) -> None:
    lose(run)
    (run / "checkpoints").mkdir()


def link_elsewhere(run: Path) -> Path:
    """The newest checkpoint is on another disk; that place."""
    newest = run / "checkpoints" / "step-00000004"
    moved = newest.rename(run.parent / "moved")
    newest.symlink_to(moved)
    return moved


def rename(run: Path) -> None:
    for step in (run / "checkpoints").iterdir():
        step.rename(step.with_suffix(".bak"))


def lose_events_too(run: Path) -> None:
    lose(run)
    (run / "events.jsonl").unlink()


@pytest.mark.parametrize("harm", [lose, do_not_mount, rename, lose_events_too])
def test_it_is_refused_and_nothing_is_written_over(
    run: Path, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    harm(run)
    before = tree(run)
    message = refused(capfd, [*RUN, "train.steps=6"])
    for words in ("there is no folder called step- and eight digits in", "put the checkpoints back", f"delete {run}"):
        assert words in message
    assert ("tells of a checkpoint of step 4" in message) == (harm is not lose_events_too)
    assert tree(run) == before


def test_a_run_goes_on_from_a_checkpoint_on_another_disk(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    moved = link_elsewhere(run)
    before = tree(moved)
    assert pretrain_gpt.main([*RUN, "train.steps=6"]) == 0
    assert "from the checkpoint of step 4" in capfd.readouterr().out
    assert tree(moved) == before
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_newest_checkpoint_whose_disk_is_not_there_is_waited_for(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(link_elsewhere(run))
    before = tree(run)
    message = refused(capfd, [*RUN, "train.steps=6"])
    assert f"it is a link to {run.parent / 'moved'}, and nothing is there" in message
    assert tree(run) == before
    (run / "checkpoints" / "step-00000004").unlink()  # as the message says
    assert pretrain_gpt.main([*RUN, "train.steps=6"]) == 0
    assert "from the checkpoint of step 2" in capfd.readouterr().out


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(run: Path) -> None:
    lose(run)
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(line for line in events if '"checkpoint"' not in line))
    assert pretrain_gpt.main(RUN) == 0
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002", "step-00000004"]


def flip_a_loss(path: Path) -> None:
    """One bit: the first digit of the loss of step 2 (5.54 becomes 1.54)."""
    lines = path.read_text().splitlines(keepends=True)
    at = lines[1].index('"loss": ') + len('"loss": ')
    lines[1] = lines[1][:at] + chr(ord(lines[1][at]) ^ 4) + lines[1][at + 1 :]
    path.write_text("".join(lines))


def lose_the_end(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("metrics.jsonl", flip_a_loss, "was changed after it was written, before the end of step 4"),
        ("events.jsonl", lose_the_end, "was changed after it was written"),
        ("metrics.jsonl", Path.unlink, "was changed after it was written"),
    ],
)
def test_a_record_that_was_changed_is_told_by_the_report_and_the_resume_which_goes_on(
    run: Path, name: str, harm: Callable[[Path], None], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    harm(run / name)
    write_report([run], None)
    assert f"{name} " in (page := (run / "report.html").read_text())
    assert words in page
    assert pretrain_gpt.main([*RUN, "train.steps=6"]) == 0
    said = capfd.readouterr().out
    assert f"warning: {name} " in said
    assert words in said
    assert words in (run / "report.html").read_text()
    (told,) = [event for event in read_events(run / "events.jsonl") if event["kind"] == "record_changed"]
    assert told["message"] in said.replace("\n", " ")


def test_a_checkpoint_knows_the_record_up_to_its_step(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By a hash of the standard library of xxHash. Nothing is told of a record that only grew."""
    for step in (2, 4):
        sealed = json.loads((run / "checkpoints" / f"step-0000000{step}" / "state.json").read_text())["record"]
        for name in ("metrics.jsonl", "events.jsonl"):
            content = (run / name).read_bytes()[: sealed[name]["bytes"]]
            assert sealed[name]["hash"] == xxhash.xxh3_128(content).hexdigest()
            assert json.loads(content.splitlines()[-1])["step"] == (step if name == "metrics.jsonl" else step - 2)
    assert pretrain_gpt.main([*RUN, "train.steps=6"]) == 0
    assert "was changed" not in capfd.readouterr().out + (run / "report.html").read_text()


class FullDisk:
    """A disk that has room for so many more files and folders below `top`."""

    def __init__(self, patch: pytest.MonkeyPatch, top: Path) -> None:
        self.room, self._top, self._open, self._mkdir = 0, str(top), os.open, os.mkdir
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "mkdir", self.mkdir)

    def open(self, path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            self._make(path)
        return self._open(path, flags, *mode, **more)

    def mkdir(self, path: Any, *mode: int, **more: Any) -> None:
        if not os.path.lexists(path):
            self._make(path)
        self._mkdir(path, *mode, **more)

    def _make(self, path: Any) -> None:
        if str(path).startswith(self._top):
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("before", [[], ["slurm-7.out"]], ids=["new", "with the scheduler's log"])
def test_a_start_that_a_full_disk_refuses_leaves_nothing(
    before: list[str], launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_corpus(launch_folder)
    run = launch_folder / "run"
    if before:
        run.mkdir()
        (run / "slurm-7.out").touch()
    held, refusals = tree(launch_folder), list[str]()
    disk = FullDisk(monkeypatch, run)
    while (status := pretrain_gpt.main([*RUN, "train.record_pipeline=1"])) == 2:
        refusals.append(capfd.readouterr().err)
        assert "No space left on device" in refusals[-1]
        assert tree(launch_folder) == held
        disk.room = len(refusals)
    assert status == 1, "it trains, and cannot save"
    assert [name for name in ("lock", "run.json", "rank-00000.log", "events.jsonl") if name not in str(refusals)] == []


def test_a_start_that_has_nothing_to_do_changes_nothing(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = tree(run), {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "lock"}
    assert pretrain_gpt.main([*RUN, "train.steps=3", "train.log_interval=7"]) == 0
    assert "already finished: step 4 of 3" in capfd.readouterr().out
    assert (tree(run), {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "lock"}) == before


def test_an_end_that_was_not_told_is_told_by_the_next_start(run: Path) -> None:
    """Killed between its last checkpoint and its last words."""
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(line for line in events if '"finished"' not in line))
    (run / "report.html").unlink()
    assert pretrain_gpt.main(RUN) == 0
    assert '"finished"' in (run / "events.jsonl").read_text()
    assert "finished" in (run / "report.html").read_text()


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o600, 0o700), (0o002, 0o664, 0o775)])
def test_files_of_a_run_are_its_user_s_alone_unless_a_umask_is_chosen(
    launch_folder: Path, umask: int, file: int, folder: int
) -> None:
    write_corpus(launch_folder)
    before = os.umask(umask)
    try:
        assert pretrain_gpt.main([*RUN, "train.record_pipeline=2"]) == 0
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    found = [launch_folder / "run", *(launch_folder / "run").rglob("*")]
    assert len(found) > 15
    assert {path.name for path in found[0].iterdir()} <= {*OWN}
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in found} == {(False, file), (True, folder)}
