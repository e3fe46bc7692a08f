"""Finished shards stay until the token file that is made of them is whole, whatever fails or is killed: only a fault of
the text removes them.
"""

import errno
import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megalite.config import files
from megalite.config.files import refusing
from megalite.config.schema import Config
from megalite.data.token_file import TokenFile
from megalite.errors.problems import UserError
from megalite.prepare import prepare as preparing
from megalite.prepare import tokenizing
from megalite.prepare.prepare import prepare, prepare_file
from megalite.prepare.sources import Source
from tests.prepare.test_prepare import PREPARE

LEFT = re.compile(r"\.(partial|tmp)-")
JOINING = {str(each.__file__) for each in (preparing, tokenizing, files)}
Finish = Callable[[Path], None]


def write_texts(folder: Path, count: int) -> list[int]:
    """Files of a shard each, every second an empty text; the tokens that they are."""
    folder.mkdir()
    expected: list[int] = []
    for number in range(count):
        text = f"text {number} é" * (number % 2)
        (folder / f"{number:04}.jsonl").write_text(f'{{"text": "{text}"}}\n')
        expected += [*text.encode(), 256] * (number % 2)
    return expected


def contents(folder: Path) -> dict[str, bytes]:
    """All files, without those that a killed process left unfinished."""
    found = (path for path in folder.rglob("*") if path.is_file() and not LEFT.search(str(path)))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def failing(*arguments: object) -> None:
    raise RuntimeError("no join today")


def nothing_left(jobs: list[Any], *others: object) -> list[Any]:
    assert not jobs, "a finished shard was lost"
    return []


@pytest.fixture
def finish(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> Finish:
    """finish(folder): prepare four shards into `folder`. In `done` all that is left to do is the join; `whole` holds
    what is to come of it."""
    source, tokens = Source("text", (str(tmp_path / "in"),)), write_texts(tmp_path / "in", 4)

    def finish(folder: Path) -> None:
        prepare_file(source, config, folder / "out")

    finish(tmp_path / "whole")
    assert TokenFile.open(tmp_path / "whole" / "out").tokens[:].tolist() == tokens
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_join", failing)
        with pytest.raises(RuntimeError):
            finish(tmp_path / "done")
    monkeypatch.setattr(preparing, "tokenize_shards", nothing_left)
    return finish


def kill_at_line(line: int) -> None:
    """Let this process end in front of line number `line` of a join."""
    left, join = [line], preparing._join

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in JOINING:
            return None
        left[0] -= event == "line"
        if left[0] == 0:
            os._exit(9)
        return trace

    def traced(*arguments: Any) -> None:
        sys.settrace(trace)
        join(*arguments)
        sys.settrace(None)

    preparing._join = traced


def test_a_kill_at_any_line_of_the_join_costs_nothing(finish: Finish, tmp_path: Path) -> None:
    for line in itertools.count(1):
        here = shutil.copytree(tmp_path / "done", tmp_path / f"at-{line}")
        if (child := os.fork()) == 0:
            try:
                kill_at_line(line)
                finish(here)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert (here / "out.idx").exists() or len(list(here.glob("out.partial-*/part-*.idx"))) == 4
        finish(here)
        assert contents(here) == contents(tmp_path / "whole")
        shutil.rmtree(here)
        if status != 9:
            break
    assert (status, line > 50) == (0, True), line


def test_a_join_needs_no_open_file_for_each_shard(tmp_path: Path, config: Config) -> None:
    expected = write_texts(tmp_path / "in", 300)
    arguments = [str(tmp_path / "in" / "*.jsonl"), str(tmp_path / "cache"), "byte", "2"]

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    subprocess.run([sys.executable, "-c", PREPARE, *arguments], check=True, capture_output=True, preexec_fn=few)
    (prefix,) = (path.with_suffix("") for path in (tmp_path / "cache" / "tokens").glob("*.idx"))
    assert TokenFile.open(prefix).tokens[:].tolist() == expected


def test_a_mistake_of_the_command_or_a_failing_disk_costs_no_shard(
    finish: Finish, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    config.model.vocab_size = 100
    with pytest.raises(UserError, match="the tokenizer has 257 tokens"):
        finish(done)
    config.model.vocab_size = None

    def unreadable(*arguments: object) -> None:
        with refusing("a.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "tokenize_shards", unreadable)
        with pytest.raises(UserError, match="cannot be read: Input/output error"):
            finish(done)
    [broken] = done.glob("out.partial-*/part-00001.json")
    broken.write_bytes(broken.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"part-00001\.json[\s\S]*delete it"):
        finish(done)
    assert len(list(broken.parent.glob("part-*.idx"))) == 4
    broken.unlink()
    with pytest.raises(AssertionError, match="a finished shard was lost"):  # it is made again, not taken for empty
        finish(done)


def test_bad_text_removes_the_shards_of_its_own_part_alone(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "good", 4)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\noops\n')
    config.data.path = str(tmp_path / "good")
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_join", failing)
        with pytest.raises(RuntimeError):
            prepare(config)
    tokens = tmp_path / "cache" / "tokens"
    config.data.path = [str(tmp_path / "bad.jsonl"), str(tmp_path / "good")]
    with pytest.raises(UserError, match=r"bad\.jsonl: line 2"):
        prepare(config)
    assert [path.name[:5] for path in tokens.glob("*.partial-*")] == ["good-"]
    assert len(list(tokens.glob("good-*.partial-*/part-*.idx"))) == 4
