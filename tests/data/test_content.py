"""A large token file that is no longer what it was is found out, and read whole only if it may be."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

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
    content.compare_changed([file], run_dir, told.append)
    with content.watched([file], run_dir, told.append):
        for thread in (each for each in threading.enumerate() if each.name == "content"):
            thread.join(5)
    return file, told


def test_a_file_that_changed_between_the_sampled_blocks_is_refused_before_it_is_read(
    prefix: Path, tmp_path: Path
) -> None:
    file, told = look(prefix, tmp_path)
    assert told[0].startswith("x.bin: samples of the content are compared now")
    assert file.tokens[:2].tolist() == [5, 6]
    file, told = look(prefix, tmp_path)
    assert told == [], "known, and of the same size and time"
    change(prefix)
    with pytest.raises(UserError, match=r"x\.bin.*or what this run has read before"):
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


@pytest.mark.parametrize("record", ["{}", "[1]", '[{"size": -1, "mtime_ns": 1, "xxh3_128": "x"}]', "[", "[]"])
def test_a_damaged_record_counts_as_none(record: str, prefix: Path, tmp_path: Path) -> None:
    (tmp_path / content.RECORD).write_text(record)
    assert look(prefix, tmp_path)[1]
    assert look(prefix, tmp_path)[1] == [], "written anew"


def test_a_disk_that_hangs_does_not_hold_the_end_of_a_run(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, again, ended = TokenFile.open(prefix), threading.Event(), []
    monkeypatch.setattr(OpenedFile, "read", lambda *_: ended.append(again.wait(60)))
    with content.watched([file], tmp_path, lambda _: None):
        pass
    assert not ended, "the read is still under way"
    again.set()


def test_a_run_does_not_go_on_with_other_tokens(
    prefix: Path, launch_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "data=tokens", f"data.path={prefix}", "run_dir=run"]
    assert pretrain_gpt.main([*command, "train.steps=200"]) == 0
    assert len(json.loads((launch_folder / "run" / content.RECORD).read_text())) == 1
    change(prefix)
    assert pretrain_gpt.main([*command, "train.steps=2000"]) == 2
    assert "its content is not what was prepared, or what this run has read before" in capfd.readouterr().err
