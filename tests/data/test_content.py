"""A large token file that is no longer what it was is found out, and read whole only if it may be."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import numpy as np
import pytest

import pretrain_gpt
from megalite.data import content, token_file
from megalite.data.disk_array import OpenedFile
from megalite.data.token_file import TokenFile
from megalite.errors.problems import UserError
from megalite.prepare.token_writer import join
from tests.bad_input.launching import SMALL, launch_folder

__all__ = ["launch_folder"]

WriteTokens = Callable[..., Path]


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 40 KB are of the kind whose identity covers some blocks alone."""
    for module in (token_file, content):
        monkeypatch.setattr(module, "HASH_WHOLE", 1_000)
    monkeypatch.setattr(token_file, "HASH_BLOCK", 64)
    monkeypatch.setattr(content, "BLOCK", 1_000)


@pytest.fixture
def prefix(write_tokens: WriteTokens) -> Path:
    return write_tokens("x", [[5, 6, 7, 8]] * 5_000, 256)


def change(prefix: Path) -> None:
    """Other ids between the blocks of the identity; the time of change is another one, too."""
    before = TokenFile.open(prefix).identity()
    with prefix.with_suffix(".bin").open("r+b") as file:
        file.seek(500)
        file.write(np.array([9, 9, 9], "<u2").tobytes())
    os.utime(prefix.with_suffix(".bin"), ns=(1, 1))
    assert TokenFile.open(prefix).identity() == before


def look(prefix: Path, run_dir: Path) -> tuple[TokenFile, list[str]]:
    """The file after all of it was looked at, and what was told before."""
    file, told = TokenFile.open(prefix), list[str]()
    found = content.compared([file], run_dir, told.append)
    with found.watched():
        for _ in range(500):
            if found.known[0] or content.opened_file(file).refusal:
                break
            time.sleep(0.01)
    return file, told


def test_a_file_that_changed_between_the_sampled_blocks_is_refused_where_it_is_read(
    prefix: Path, tmp_path: Path
) -> None:
    file, told = look(prefix, tmp_path)
    assert "x.bin was not hashed whole before" in told[0]
    assert file.tokens[:2].tolist() == [5, 6]
    file, told = look(prefix, tmp_path)
    assert told == [], "known, and of the same size and time"
    change(prefix)
    with pytest.raises(UserError, match=r"x\.bin.*its content is not what this run has read before"):
        look(prefix, tmp_path)


def test_a_file_of_ours_is_compared_with_what_was_prepared(prefix: Path, tmp_path: Path) -> None:
    join([TokenFile.open(prefix)], tmp_path / "ours", {})
    change(tmp_path / "ours")
    file, _ = look(tmp_path / "ours", tmp_path)
    with pytest.raises(UserError, match=r"ours\.bin.*its content is not what was prepared"):
        file.tokens[:2]


def test_the_same_content_elsewhere_or_later_is_read_again_and_accepted(prefix: Path, tmp_path: Path) -> None:
    look(prefix, tmp_path)
    os.utime(prefix.with_suffix(".bin"), ns=(1, 1))
    file, told = look(prefix, tmp_path)
    assert len(told) == 1
    assert file.tokens[:2].tolist() == [5, 6]
    assert look(prefix, tmp_path)[1] == []


def test_all_files_that_are_others_now_are_named(prefix: Path, write_tokens: WriteTokens, tmp_path: Path) -> None:
    files = [TokenFile.open(each) for each in (prefix, write_tokens("y", [[1, 2]] * 9_000, 256))]
    found = content.compared(files, tmp_path, lambda _: None)
    assert all(found.hash(number, lambda: True) for number in (0, 1))
    for file in files:
        change(file.prefix)
    with pytest.raises(UserError) as refusal:
        content.compared(files, tmp_path, lambda _: None)
    assert [Path(str(problem.value)).name for problem in refusal.value.problems] == ["x.bin", "y.bin"]


@pytest.mark.parametrize("record", ["{}", "[1]", '[{"size": -1, "mtime_ns": 1, "xxh3_128": "x"}]', "[", "[]"])
def test_a_damaged_record_counts_as_none_and_is_told_of(record: str, prefix: Path, tmp_path: Path) -> None:
    (tmp_path / content.RECORD).write_text(record)
    _, told = look(prefix, tmp_path)
    assert [content.RECORD in line for line in told] == ([True, False] if record != "[]" else [False])
    assert look(prefix, tmp_path)[1] == [], "written anew"


def test_a_disk_that_hangs_does_not_hold_the_end_of_a_run(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "PATIENCE", 0.1)
    found, again, ended = content.compared([TokenFile.open(prefix)], tmp_path, lambda _: None), Event(), []
    monkeypatch.setattr(OpenedFile, "read", lambda *_: ended.append(again.wait(60)))
    with found.watched():
        pass
    assert not ended, "the read is still under way"
    again.set()


def test_a_run_refuses_to_go_on_with_other_tokens_before_its_first_step(
    prefix: Path, launch_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*SMALL, "data=tokens", f"data.path={prefix}", "run_dir=run"]
    command += ["checkpoint.interval=1", "checkpoint.keep=2"]
    assert pretrain_gpt.main([*command, "train.steps=200"]) == 0
    assert len(json.loads((launch_folder / "run" / content.RECORD).read_text())) == 1
    kept = sorted((launch_folder / "run" / "checkpoints").iterdir())
    change(prefix)
    monkeypatch.setattr(content, "PAUSE", 1.0)  # a large file takes long
    assert pretrain_gpt.main([*command, "train.steps=204"]) == 2
    assert "its content is not what this run has read before" in capfd.readouterr().err
    assert sorted((launch_folder / "run" / "checkpoints").iterdir()) == kept
