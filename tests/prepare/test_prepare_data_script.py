"""`megalite prepare`: what docs/data.md says about it is so."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pretrain_gpt
from megalite.commands import models
from megalite.config.compose import load_config
from megalite.config.overrides import typed
from megalite.prepare import prepare as preparation
from tests.bad_input.launching import SMALL

PREPARE = (sys.executable, "-m", "megalite", "prepare")
Main = Callable[..., int]


@pytest.fixture(scope="module")
def main() -> Main:
    """The command in this process."""
    return lambda *arguments: models.prepare([str(argument) for argument in arguments])


def of_text(path: Path | str) -> list[str]:
    return ["data=text", f"data.path={path}"]


def write_documents(path: Path, count: int) -> None:
    """Lines of JSON, of 1300 bytes each."""
    rows = ({"body": f"document {number:05}: " + "the quick brown fox; " * 60} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_it_prepares_says_what_it_made_and_verifies_it(
    tmp_path: Path, main: Main, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"body": "some text é " * 20}] * 50 + [{"body": None}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = main(*of_text(tmp_path / "*.jsonl"), "data.text_column=body", "tokenizer=byte", "--output", tmp_path / "out")
    said = capfd.readouterr()
    assert made == 0, said.err
    assert "50 documents, 13,050 tokens, 13,000 bytes, 0.996 bytes per token, vocabulary 257 (uint16)" in said.out
    assert "every document ends with token 256" in said.out
    assert "skipped 3 rows without text" in said.out
    assert re.search(r"^prepared [\d.]+ MB: 50 documents, 13,050 tokens in 0:0\d$", said.err, re.MULTILINE)
    assert main("--verify", "data=tokens", f"data.path={tmp_path / 'out'}") == 0
    assert "sound; 50 documents, 13,050 tokens" in capfd.readouterr().out
    assert main("--verify", "data=tokens", f"data.path={tmp_path / 'out'}", "model.vocab_size=150") == 2
    assert "token id 195 at token " in capfd.readouterr().err


def test_the_command_that_it_prints_trains_on_what_it_made(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 90)
    assert main(*of_text("a.txt"), "tokenizer=char", "--output", "with space, and=more [0]") == 0
    said = capfd.readouterr().out
    assert "no end-of-document token" in said
    command = shlex.split(said.rpartition("train on it: ")[2])
    assert command[:3] == ["python", "pretrain_gpt.py", "data=tokens"]
    small = [setting for setting in SMALL if not setting.startswith("tokenizer=")]
    assert pretrain_gpt.main([*small, *command[2:], "run_dir=run", "train.steps=0"]) == 0
    assert "900 tokens" in capfd.readouterr().out


@pytest.mark.parametrize(
    "path", ["tokens/my-corpus_2.v1", "007", "1e5", "inf", 'it\'s "it"', "a\\b\\", "$HOME", "é", "[a,b]"]
)
def test_a_path_comes_through_shell_and_hydra_as_it_is(path: str) -> None:
    [override] = shlex.split(typed("data.path", path))
    assert load_config(["data=tokens", "model.vocab_size=9", override], 1).data.path == str(Path(path).absolute())
    assert ("'" in typed("data.path", path)) == (path != "tokens/my-corpus_2.v1"), "quoted only where it must be"


def test_killed_it_continues_and_ends_with_the_same_bytes(
    tmp_path: Path, main: Main, capfd: pytest.CaptureFixture[str]
) -> None:
    """All processes are killed at once; test_prepare.py kills the first one alone."""
    write_documents(tmp_path / "a.jsonl", 8000)
    shards = -(-(tmp_path / "a.jsonl").stat().st_size // (1 << 20))
    settings = ["data.text_column=body", "tokenizer=byte", "data.workers=2"]
    command = [*of_text(tmp_path / "a.jsonl"), *settings, "--output"]
    started = subprocess.Popen(
        [*PREPARE, *command, tmp_path / "cut" / "out"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    work = tmp_path / "cut"
    while not list(work.glob("*.partial-*/part-*.idx")):
        assert started.poll() is None, "ended before it could be killed: enlarge the input"
        time.sleep(0.005)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    assert not list(work.glob("out.*[xn]")), "a part of the work looks like the whole"
    kept = {path.name: path.stat().st_mtime_ns for path in work.glob("*.partial-*/part-*.idx")}
    assert 1 <= len(kept) < shards

    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        tokenize = preparation.tokenize_shards
        patch.setattr(
            preparation,
            "tokenize_shards",
            lambda jobs, *rest: done.extend(file.name for file, _ in jobs) or tokenize(jobs, *rest),
        )
        assert main(*command, work / "out") == 0
    assert len(done) == shards - len(kept)
    assert not {f"{name}.idx" for name in done} & kept.keys()
    assert main(*command, tmp_path / "whole" / "out") == 0
    files = {path.relative_to(work): path.read_bytes() for path in work.rglob("*") if path.is_file()}
    whole = tmp_path / "whole"
    assert files == {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert capfd.readouterr().err.count("8,000 documents") == 2, "what was kept counts"


def test_stopped_it_says_how_to_go_on(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("some text " * 90)
    monkeypatch.setattr(preparation, "tokenize_shards", interrupted)
    assert main(*of_text(tmp_path / "a.txt"), "--output", tmp_path / "out") == 130
    assert "the same command continues" in capfd.readouterr().err


LONG = "a" * 300  # a name that no file can have


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*of_text("gone.txt"), "--output", "x"], ["data.path='", "gone.txt'", "there is no such file"]),
        (
            [*of_text("a.txt"), "data.workers=0", "--output", LONG],
            ["refused, 2 problems", "--output=", "data.workers=0"],
        ),
        ([*of_text("a.txt"), "--output", "a.txt/x"], ["--output=", "cannot be written", "choose a writable folder"]),
        ([*of_text("a.txt"), "--output", "x", "tokenizer=./none"], ["tokenizer='./none'", "there is no folder"]),
        ([*of_text("a.jsonl"), "--output", "x", "data.text_column=body"], ["'body'", "it has: text", "text_column"]),
        *(([*of_text("a.txt"), "--output", name], ["--output=", "names no file"]) for name in ("", ".", "/", "..")),
        (["data=hf", "data.path=[a/b,c/d]", "--output", "x"], ["made of one data set"]),
        (["data=tokens", "data.path=x", "--output", "y"], ["prepared already", "--verify"]),
        (["data=tokens", "data.path=gone", "--verify"], ["gone.bin", "is missing"]),
        ([*of_text("a.txt"), "--verify"], ["data='text'", "data=tokens data.path=PREFIX"]),
    ],
)
def test_mistakes_are_refused_with_status_two_and_nothing_written(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 90)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert main(*arguments) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert all(word in said for word in words), said
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "a.jsonl"}


def test_token_files_of_one_s_own_need_no_cache(tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 90)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a.txt"))
    assert main(*of_text(tmp_path / "a.txt"), "--output", tmp_path / "out") == 0
