"""Files of users are read or refused by name, and replaced by their own kind alone; a run takes no folder of others."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megalite.commands import sweep
from megalite.config import files
from megalite.config.compose import load_config
from megalite.config.files import STATUS, Kind, as_record, read_bytes, read_object, read_yaml, write_atomically
from megalite.errors.problems import UserError
from megalite.observe.report import page
from tests.config.refusal import refusal, settings

# As f4fa60b wrote them, but the pictures, which have a mark only since.
WRITTEN = {
    "STATUS": b'{"state": "stopped", "step": 6, "steps": 20, "run_dir": "/scratch/run", "by": "SIGUSR1"}\n',
    "POINT": b'{"words": ["seed=1"], "run_dir": "/runs/x", "status": "trained", "val_loss": 4.5}',
    "STOP": b"..",
    "SWEEP": b"hydra:\n  run:\n    dir: .\n",
    "RUN_LOCK": b'{"host": "n1", "pid": 1, "started": "now", "job": null, "token": "ab"}',
    "REPORT": b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
    b'<meta name="generator" content="megalite report"/>\n',
    "COMPARISON": b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
    b'<meta name="generator" content="megalite comparison"/>\n',
}
PLACES = (files, page, sweep)
KINDS: dict[str, Kind] = {name: getattr(place, name) for name in WRITTEN for place in PLACES if name in vars(place)}
FOREIGN = {
    "text": b"Call me Ishmael.\n",
    "binary": b"\x00\xff" * 3000,
    "empty": b"",
    "json": b'{"state": "of the art", "step": "by step"}',
    "config": b"model:\n  name: tiny\nrun_dir: /scratch/run\n",
    "page": b"<!DOCTYPE html>\n<html><body>megalite report</body></html>",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_takes_the_place_of_its_own_kind_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    for other, content in (WRITTEN | FOREIGN).items():
        path.write_bytes(content)
        if other == name or (other, name) == ("empty", "RUN_LOCK"):
            write_atomically(path, b"new", KINDS[name])
            assert path.read_bytes() == b"new"
        else:
            with pytest.raises(FileExistsError, match="holds something else than"):
                write_atomically(path, b"new", KINDS[name])
            assert path.read_bytes() == content, other
    path.unlink()
    write_atomically(path, b"new", KINDS[name])
    assert os.listdir(tmp_path) == ["file"], "no draft stays"


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    link, dangling, folder, pipe = (tmp_path / name for name in ("link", "dangling", "folder", "pipe"))
    (tmp_path / "ours").write_bytes(WRITTEN["STATUS"])
    link.symlink_to(tmp_path / "ours")
    dangling.symlink_to("nowhere")
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (link, dangling, folder, pipe, Path("/dev/null")):
        before = os.lstat(path).st_ino
        with pytest.raises(OSError, match=r"and is not replaced|Permission denied"):
            write_atomically(path, b"new", STATUS)
        assert os.lstat(path).st_ino == before


# --- launch.status_file ----------------------------------------------------------------------------------------------


def test_a_status_file_takes_no_file_of_others(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_bytes(FOREIGN["text"])
    assert settings(refusal(f"launch.status_file={path}", f"run_dir={tmp_path}/run")) == ["launch.status_file"]
    assert path.read_bytes() == FOREIGN["text"]


@pytest.mark.parametrize("name", ["", "lock", "config.yaml", "events.jsonl", "logs/x"])
def test_a_status_file_is_not_where_the_run_will_write(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    run = tmp_path / "run"
    for place in (run, tmp_path / "link" / "run"):
        assert "files of its own" in str(refusal(f"run_dir={run}", f"launch.status_file={place / name}"))
    assert "files of its own" in str(refusal(f"run_dir={run}/{name}/x", f"launch.status_file={run}"))
    kept = load_config([f"run_dir={run}", f"launch.status_file={run}/my.status"], 1)
    assert kept.launch.status_file == f"{run}/my.status"


def test_a_status_file_is_not_what_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(WRITTEN["STATUS"] * 100)
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    words = [f"launch.status_file={tmp_path}/b.txt", f"run_dir={tmp_path.parent}/elsewhere"]
    for path in (tmp_path / "a.txt", f"'{tmp_path}/a*'", tmp_path):
        assert "into its own data" in str(refusal("data=text", f"data.path={path}", *words))
    assert load_config(words, 1), "without that text it is one of ours"


# --- run_dir ---------------------------------------------------------------------------------------------------------


def taken(folder: Path) -> bool:
    """Whether a run may be kept in the folder."""
    try:
        return load_config([f"run_dir={folder}"], 1).run_dir == str(folder)
    except UserError:
        return False


def test_a_run_s_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert settings(refusal(f"run_dir={tmp_path}/file")) == ["run_dir"]
    assert settings(refusal(f"run_dir={tmp_path}/file/run")) == ["run_dir"]
    assert taken(tmp_path / "new" / "run")
    assert "/proc cannot be written" in str(refusal("run_dir=/proc/nowhere/run"))
    assert sorted(os.listdir(tmp_path)) == ["file"], "what was tried is gone"


@pytest.mark.parametrize("name", ["main.py", "lock", "tokenizer/tokenizer.json", "checkpoints/step-00000001/x"])
def test_files_of_others_are_left_alone_but_the_folder_of_a_run_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    said = str(refusal(f"run_dir={tmp_path}"))
    assert f"it holds {name.partition('/')[0]}, and" in said
    assert "put its run.json back" in said
    for ours in ("run.json", "config.yaml"):
        (tmp_path / ours).write_text("{}")
    assert taken(tmp_path)


@pytest.mark.parametrize("name", ["slurm-17.out", "slurm-17.err", "train.log", ".DS_Store", "logs/17.txt", "lock"])
def test_logs_and_what_a_killed_start_has_left_are_no_files_of_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    (tmp_path / "checkpoints").mkdir()
    assert taken(tmp_path)
    (tmp_path / "lock").write_bytes(WRITTEN["RUN_LOCK"])
    assert taken(tmp_path)


# --- files that are read ----------------------------------------------------------------------------------------------


def test_a_file_that_is_missing_a_folder_a_fifo_or_a_device_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("missing", "folder", "fifo", "zero"):
        with pytest.raises(UserError, match=f"{tmp_path / name}: "):
            read_bytes(tmp_path / name)


NO_JSON = [b"\xff{}", b"{", b"", b"[" * 100_000, b"1" * 5_000, b"\x00"]
NO_YAML = [b"\xff", b"a: [", b"a: 1\na: 2", b"!!python/object/apply:os.system [true]", b"[" * 20_000]


@pytest.mark.parametrize(
    ("read", "content"), [*((read_object, c) for c in NO_JSON), *((read_yaml, c) for c in NO_YAML)]
)
def test_content_of_another_kind_is_refused(tmp_path: Path, read: Callable[[Path], Any], content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path}: "):
        read(path)


@dataclass
class Line:
    step: int
    loss: float
    note: str | None = None


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"step": -1, "loss": 1.0}, "step=-1"),
        ({"step": True, "loss": 1.0}, "step=True"),
        ({"step": 1, "loss": "low"}, "loss='low'"),
        ({"step": 1, "loss": 1.0, "note": 3}, "note=3"),
        ({"loss": 1.0}, "'step'"),
        ([1, 2], "object"),
    ],
)
def test_a_record_names_the_field_that_is_wrong(found: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        as_record(Line, found, "line 7")


def test_a_record_takes_what_fits_and_ignores_what_it_does_not_know() -> None:
    text = '{"step": 3, "loss": 2, "later": "field"}'
    assert as_record(Line, json.loads(text), "line 7") == Line(3, 2.0)
