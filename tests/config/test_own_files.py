"""A file takes the place of its own kind alone: what others wrote, and what is no regular file, stays as it is."""

import os
from pathlib import Path

import pytest

from megalite.config import durable_files
from megalite.config.compose import load_config
from megalite.config.durable_files import STATUS, Kind, in_the_way, picture_of, write_atomically
from megalite.errors.problems import UserError

# As f4fa60b wrote them, but the pictures, which have a mark only since.
WRITTEN = {
    "STATUS": b'{"state": "stopped", "step": 6, "steps": 20, "run_dir": "/scratch/run", "by": "SIGUSR1"}\n',
    "FIGURES": b'[\n  {\n    "model": "tiny",\n    "precision": "fp32",\n    "parameters": 7',
    "POINT": b'{"words": ["seed=1"], "run_dir": "/runs/x", "status": "trained", "val_loss": 4.5}',
    "STOP": b"..",
    "SWEEP": b"hydra:\n  run:\n    dir: .\n",
    "RUN_LOCK": b'{"host": "n1", "pid": 1, "started": "now", "job": null, "token": "ab"}',
    "REPORT": b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
    b'<meta name="generator" content="megalite report"/>\n',
    "COMPARISON": b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
    b'<meta name="generator" content="megalite comparison"/>\n',
}
KINDS: dict[str, Kind] = {name: getattr(durable_files, name) for name in WRITTEN}
FOREIGN = {
    "text": b"Call me Ishmael.\n",
    "binary": b"\x00\xff" * 3000,
    "empty": b"",
    "json": b'{"state": "of the art", "step": "by step"}',
    "identity": b'{\n "run_id": "3cf9",\n "data_fingerprint": "ab"\n}\n',
    "config": b"model:\n  name: tiny\nrun_dir: /scratch/run\n",
    "record": b'{"step": 1, "loss": 5.5}\n',
    "page": b"<!DOCTYPE html>\n<html><body>megalite report</body></html>",
    "drawing": b'<?xml version="1.0"?>\n<svg><dc:title>Matplotlib v3.11.2</dc:title></svg>',
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


def test_what_is_no_regular_file_is_never_replaced_even_where_it_leads_to_one_of_ours(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.write_bytes(WRITTEN["STATUS"])
    link, dangling, folder, pipe = (tmp_path / name for name in ("link", "dangling", "folder", "pipe"))
    link.symlink_to(ours)
    dangling.symlink_to("nowhere")
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (link, dangling, folder, pipe, Path("/dev/null")):
        before = os.lstat(path).st_ino
        with pytest.raises(OSError, match=r"and is not replaced|Permission denied"):
            write_atomically(path, b"new", STATUS)
        assert os.lstat(path).st_ino == before
    assert ours.read_bytes() == WRITTEN["STATUS"]
    os.link(ours, tmp_path / "hard")
    write_atomically(tmp_path / "hard", b"new", STATUS)
    assert ours.read_bytes() == WRITTEN["STATUS"], "the other name keeps what it had"


def test_a_picture_is_of_one_command(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text('<?xml version="1.0"?>\n<svg><metadata><dc:title>megalite ranks</dc:title></metadata></svg>')
    assert not in_the_way(path, picture_of("ranks"))
    assert in_the_way(path, picture_of("schedule"))


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(list(words), 1)
    return str(error.value)


def test_a_status_file_takes_no_file_of_others(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_bytes(FOREIGN["text"])
    for name in (path, f"{tmp_path}/../{tmp_path.name}/status"):
        assert "launch.status_file=" in refused(f"launch.status_file={name}", f"run_dir={tmp_path}/run")
    assert path.read_bytes() == FOREIGN["text"]
    assert os.listdir(tmp_path) == ["status"]


@pytest.mark.parametrize("name", ["", "lock", "run.json", "config.yaml", "metrics.jsonl", "events.jsonl", "logs/x"])
def test_a_status_file_is_not_where_the_run_will_write(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    run = tmp_path / "run"
    for place in (run, tmp_path / "link" / "run"):
        assert "files of its own" in refused(f"run_dir={run}", f"launch.status_file={place / name}")
    assert "files of its own" in refused(f"run_dir={run}/{name}/x", f"launch.status_file={run}")
    kept = load_config([f"run_dir={run}", f"launch.status_file={run}/my.status"], 1)
    assert kept.launch.status_file == f"{run}/my.status"


def test_a_status_file_is_not_what_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(WRITTEN["STATUS"] * 100)
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    for path in (tmp_path / "a.txt", f"'{tmp_path}/a*'", tmp_path):
        status = f"launch.status_file={tmp_path}/b.txt"
        assert "into its own data" in refused(
            "data=text", f"data.path={path}", status, f"run_dir={tmp_path.parent}/elsewhere"
        )
    assert load_config([f"launch.status_file={tmp_path}/b.txt"], 1), "without that text it is one of ours"
