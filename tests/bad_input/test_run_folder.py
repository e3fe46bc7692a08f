"""A run whose checkpoints are gone does not silently begin again; one that never saved does."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import pretrain_gpt
from megalite.checkpoint.lock import RunLock
from megalite.config.run_dir import OWN
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


def link_elsewhere(run: Path) -> None:
    for step in (run / "checkpoints").iterdir():
        moved = step.rename(run.parent / step.name)
        step.symlink_to(moved)


def lose_events_too(run: Path) -> None:
    lose(run)
    (run / "events.jsonl").unlink()


@pytest.mark.parametrize("harm", [lose, do_not_mount, link_elsewhere, lose_events_too])
def test_it_is_refused_and_nothing_is_written_over(
    run: Path, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    harm(run)
    before = tree(run)
    message = refused(capfd, [*RUN, "train.steps=6"])
    for words in ("there is no checkpoint in", "put the checkpoints back", "from step 1 on purpose", f"delete {run}"):
        assert words in message
    assert ("tells of a checkpoint of step 4" in message) == (harm is not lose_events_too)
    assert tree(run) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(run: Path) -> None:
    lose(run)
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(line for line in events if '"checkpoint"' not in line))
    assert pretrain_gpt.main(RUN) == 0
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002", "step-00000004"]


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


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.with_suffix(".precious").write_text("precious")
    path.symlink_to(path.with_suffix(".precious"))


APPENDED = ["events.jsonl", "lock", "logs/rank-00000.log"]


@pytest.mark.parametrize(
    ("name", "put"),
    [
        *((name, put) for name in ("run.json", "metrics.jsonl", *APPENDED) for put in (a_folder, a_pipe)),
        *((name, a_link) for name in APPENDED),
    ],
)
def test_what_lies_in_the_place_of_a_file_is_refused_by_its_name(
    run: Path, name: str, put: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink()
    put(run / name)
    assert name in refused(capfd, [*RUN, "train.steps=6"])
    if put is a_link:
        assert (run / name).read_text() == "precious"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"run_id": 3, "data_fingerprint": "x"}', "run_id=3, which is not of type str"),
        (b'{"run_id": "x"}', "lacks 'data_fingerprint'"),
        (b"\xff", "is not UTF-8 text"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
    ids=["type", "missing", "bytes", "deep"],
)
def test_an_identity_of_another_form_is_refused(
    run: Path, content: bytes, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / "run.json").write_bytes(content)
    message = refused(capfd, [*RUN, "train.steps=6"])
    assert f"{run / 'run.json'}" in message
    assert words in message


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"[1]", b'{"host": 1, "pid": "x"}'], ids=len)
def test_a_lock_that_names_nobody_is_nobody_s(run: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RunLock.__init__.__kwdefaults__, "patience_s", 0.5)  # for a holder on another host
    (run / "lock").write_bytes(content)
    assert pretrain_gpt.main([*RUN, "train.steps=5"]) == 0


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
