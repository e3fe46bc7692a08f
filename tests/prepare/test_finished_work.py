"""Finished shards stay until the token file that is made of them is whole, whatever fails or is killed: only a fault of
the text removes them. An error names its cause and what mends it.
"""

import errno
import itertools
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megalite.config import durable_files
from megalite.config.schema import Config
from megalite.config.user_files import refusing
from megalite.data.token_file import TokenFile
from megalite.errors.problems import UnavailableError, UserError
from megalite.prepare import prepare as preparing
from megalite.prepare import token_writer
from megalite.prepare.prepare import prepare, prepare_file
from megalite.prepare.sources import Source
from tests.prepare.test_prepare import PREPARE

LEFT = re.compile(r"\.(partial|tmp)-")
JOINING = {str(each.__file__) for each in (preparing, token_writer, durable_files)}
CAUSES = {
    errno.EMFILE: ("Too many open files", "ulimit -n"),
    errno.ENOSPC: ("No space left on device", "free some space"),
    errno.EDQUOT: ("Disk quota exceeded", "quota"),
    errno.EIO: ("Input/output error", "dmesg"),
    errno.EACCES: ("Permission denied", "allow this user"),
    errno.EROFS: ("Read-only file system", "mount that disk for writing"),
}


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


def nothing_left(jobs: list[Any], *others: object) -> None:
    assert not jobs, "a finished shard was lost"


@dataclass(frozen=True)
class Joinable:
    """A preparation of which only the join is left to do: its folder, and what that is to hold at the end."""

    source: Source
    config: Config
    folder: Path
    expected: dict[str, bytes]

    def at(self, folder: Path) -> "Joinable":
        shutil.copytree(self.folder, folder)
        return replace(self, folder=folder)

    def finish(self) -> None:
        prepare_file(self.source, self.config, self.folder / "out")

    def check(self) -> None:
        """No finished shard is lost, and another start makes of them what an undisturbed one would have."""
        assert (self.folder / "out.idx").exists() or len(list(self.folder.glob("out.partial-*/part-*.idx"))) == 4
        self.finish()
        assert contents(self.folder) == self.expected
        shutil.rmtree(self.folder)


@pytest.fixture
def joinable(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> Joinable:
    tokens = write_texts(tmp_path / "in", 4)
    source = Source("text", (str(tmp_path / "in"),))
    prepare_file(source, config, tmp_path / "whole" / "out")
    assert TokenFile.open(tmp_path / "whole" / "out").tokens[:].tolist() == tokens
    made = Joinable(source, config, tmp_path / "done", contents(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_join", failing)
        with pytest.raises(RuntimeError):
            made.finish()
    monkeypatch.setattr(preparing, "tokenize_shards", nothing_left)
    return made


@contextmanager
def struck(line: int, blow: Callable[[], None]) -> Iterator[list[int]]:
    """Meanwhile, the blow falls in front of line number `line` of a join. Gives what is left of that number."""
    left, join = [line], preparing._join

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in JOINING:
            return None
        left[0] -= event == "line"
        if event == "line" and left[0] == 0:
            blow()
        return trace

    def traced(*arguments: Any) -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            join(*arguments)
        finally:
            sys.settrace(before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_join", traced)
        yield left


def test_an_error_at_any_line_of_the_join_costs_nothing_and_names_its_cause(joinable: Joinable, tmp_path: Path) -> None:
    told: dict[int, str] = {}
    for line in itertools.count(1):
        here, cause = joinable.at(tmp_path / f"at-{line}"), [*CAUSES][line % len(CAUSES)]

        def fail(cause: int = cause) -> None:
            raise OSError(cause, os.strerror(cause))

        with struck(line, fail) as left:
            try:
                here.finish()
            except UserError as error:
                told[cause] = str(error)
        here.check()
        if left[0] > 0:
            break
    assert line > 50, line
    assert told.keys() == CAUSES.keys()
    assert all(word in told[cause] for cause, words in CAUSES.items() for word in words)


def test_a_kill_at_any_line_of_the_join_costs_nothing(joinable: Joinable, tmp_path: Path) -> None:
    for line in itertools.count(1):
        here = joinable.at(tmp_path / f"at-{line}")
        if (child := os.fork()) == 0:
            try:
                with struck(line, lambda: os._exit(9)):
                    here.finish()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        here.check()
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
    joinable: Joinable, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    [work] = joinable.folder.glob("out.partial-*")
    config.model.vocab_size = 100
    with pytest.raises(UserError, match="the tokenizer has 257 tokens"):
        joinable.finish()
    config.model.vocab_size = None

    def unreadable(*arguments: object) -> None:
        with refusing("a.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "tokenize_shards", unreadable)
        with pytest.raises(UserError, match="cannot be read: Input/output error"):
            joinable.finish()
    broken = work / "part-00001.json"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-5])
    with pytest.raises(UserError, match=r"part-00001\.json[\s\S]*delete it"):
        joinable.finish()
    assert len(list(work.glob("part-*.idx"))) == 4
    broken.unlink()
    with pytest.raises(AssertionError, match="a finished shard was lost"):  # it is made again, not taken for empty
        joinable.finish()
    broken.write_bytes(whole)
    joinable.check()


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


@pytest.mark.parametrize("cause", CAUSES)
def test_the_system_s_refusal_comes_whole_from_a_worker(cause: int) -> None:
    with pytest.raises(UnavailableError) as refusal, refusing("a.txt", "repair it"):
        raise OSError(cause, os.strerror(cause))
    came = pickle.loads(pickle.dumps(refusal.value))
    assert isinstance(came, UnavailableError)
    assert all(word in str(came) for word in CAUSES[cause])
    with pytest.raises(UserError, match="repair it") as refusal, refusing("a.txt", "repair it"):
        raise OSError("what a library says of bad content")
    assert not isinstance(refusal.value, UnavailableError)
