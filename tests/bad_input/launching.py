"""A bad input as a row of a table, and the command that meets it: status 2, one message, nothing written.

A row runs the launcher's `main` in this process, on a model that trains in milliseconds.
"""

import os
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megalite.commands import models

SMALL = [
    *("model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "tokenizer=byte", "train.steps=4"),
    *("train.seq_length=16", "train.global_batch_size=4", "train.micro_batch_size=2", "train.sample_tokens=0"),
    *("train.eval_interval=0", "device=cpu", "precision=fp32", "parallel.startup_timeout_s=20"),
]
TOKENS = ["data=tokens", "data.path=corpus", "model.vocab_size=256"]


@dataclass(frozen=True)
class Scene:
    """Where a row happens. `until_the_end` closes what the row opens, after its command."""

    folder: Path
    patch: pytest.MonkeyPatch
    until_the_end: ExitStack


def nothing(scene: Scene) -> None:
    """No files are needed."""


@dataclass(frozen=True)
class Row:
    """One input, and words of the message with which it is refused.

    `ranks`: the launcher is told that it is rank 0 of so many; what is refused is refused before anyone else is asked.
    `command`: that one of megalite/commands/models.py refuses, with `argv` alone.
    """

    what: str
    argv: str
    words: list[str]
    arrange: Callable[[Scene], None] = nothing
    variables: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    command: str | None = None

    def __str__(self) -> str:
        return self.what

    def run(self, words: list[str]) -> int:
        """The command's status. `words`: what every training command of the table says first."""
        if self.command is None:
            return pretrain_gpt.main([*words, *self.argv.split()])
        main: Callable[[list[str]], int] = getattr(models, self.command)
        return main(self.argv.split())


def check(row: Row, scene: Scene, capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    """The row is refused in one message that holds its words, and leaves every file as it was."""
    row.arrange(scene)
    ranks = {"RANK": "0", "WORLD_SIZE": str(row.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for name, value in {**(ranks if row.ranks > 1 else {}), **row.variables}.items():
        scene.patch.setenv(name, value)
    before = tree(scene.folder)
    capfd.readouterr()
    status, message = row.run(words), capfd.readouterr().err
    assert status == 2, message
    assert message.count("megalite: refused") == 1, message
    assert "Traceback" not in message
    missing = [word for word in row.words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "CLISECRET" not in message
    assert tree(scene.folder) == before
    left = [path.name for path in (scene.folder.parent / "cache").rglob("*")]
    assert not [name for name in left if ".partial-" in name or ".tmp-" in name]


def refused(capfd: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one message with which the launcher refuses a command."""
    capfd.readouterr()
    assert pretrain_gpt.main(argv) == 2
    message = capfd.readouterr().err
    assert message.count("megalite: refused") == 1, message
    assert "Traceback" not in message
    return message


def tree(folder: Path) -> dict[str, bytes]:
    """Everything in a folder: names and contents."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_of_run(finished: Path, folder: Path) -> Path:
    """What `finished` holds, its run and data, in `folder`, as if it had been made there."""
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    config = folder / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(finished), str(folder)))
    return folder / "run"


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to launch from, an empty cache beside it, and no GPU."""
    folder = tmp_path / "launch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return folder


@pytest.fixture
def scene(launch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with ExitStack() as until_the_end:
        yield Scene(launch_folder, monkeypatch, until_the_end)


# --- files -----------------------------------------------------------------------------------------------------------


def file(name: str, content: bytes) -> Callable[[Scene], None]:
    def arrange(scene: Scene) -> None:
        (scene.folder / name).parent.mkdir(exist_ok=True)
        (scene.folder / name).write_bytes(content)

    return arrange


def write_corpus(folder: Path, *, stranger_at: int = -1, count: int = 5000) -> None:
    """A token file of one document, with an id beyond the vocabulary of 256 somewhere."""
    tokens = (np.arange(count) % 200).astype("<u2")
    if stranger_at >= 0:
        tokens[stranger_at] = 9999
    tokens.tofile(folder / "corpus.bin")
    arrays = np.array([count], "<i4").tobytes() + np.array([0, 0, 1], "<i8").tobytes()
    (folder / "corpus.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2) + arrays)


def corpus(scene: Scene) -> None:
    write_corpus(scene.folder)


def truncated_corpus(scene: Scene) -> None:
    write_corpus(scene.folder)
    os.truncate(scene.folder / "corpus.bin", 8000)
