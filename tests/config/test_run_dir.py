"""A run takes no folder that holds files of others, nor one that cannot be made; said before torch is there."""

import os
from pathlib import Path

import pytest

from megalite.config.compose import load_config
from megalite.config.hydra_files import CONF
from megalite.errors.problems import UserError
from tests.config.refusal import refusal, settings


def taken(folder: Path) -> bool:
    """Whether a run may be kept in the folder."""
    try:
        return load_config([f"run_dir={folder}"], 1).run_dir == str(folder)
    except UserError:
        return False


def test_it_must_be_a_folder_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert settings(refusal(f"run_dir={tmp_path}/file")) == ["run_dir"]
    assert settings(refusal(f"run_dir={tmp_path}/file/run")) == ["run_dir"]
    assert load_config([f"run_dir={tmp_path}/new/run"], 1).run_dir == f"{tmp_path}/new/run"
    assert "/proc cannot be written" in str(refusal("run_dir=/proc/nowhere/run"))
    assert sorted(os.listdir(tmp_path)) == ["file"], "what was tried is gone"


def test_what_a_run_would_write_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.yaml", "notes.txt", "report.html"):
        (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    message = str(refusal("run_dir=."))
    assert "it holds config.yaml, notes.txt, report.html, and" in message
    assert "put its run.json back" in message
    assert "config.yaml" in str(refusal(f"run_dir={CONF}"))


@pytest.mark.parametrize("name", ["main.py", "lock", "tokenizer/tokenizer.json", "checkpoints/step-00000001/x"])
def test_files_of_others_are_left_alone_but_the_folder_of_a_run_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert not taken(tmp_path)
    for ours in ("run.json", "config.yaml"):
        (tmp_path / ours).write_text("{}")
    assert taken(tmp_path)


@pytest.mark.parametrize(
    "name", ["slurm-17.out", "slurm-17.err", "train.log", ".DS_Store", "logs/17.txt", "checkpoints/", "lock"]
)
def test_logs_and_what_a_killed_start_has_left_are_no_files_of_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("")
    assert taken(tmp_path)
    (tmp_path / "lock").write_text('{"host": "n1", "pid": 1, "started": "now", "job": null, "token": "ab"}')
    assert taken(tmp_path)
