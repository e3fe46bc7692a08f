"""Whatever is wrong with a file that a user may have changed is one refusal that names it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megalite.config.user_files import as_record, read_bytes, read_object, read_yaml
from megalite.errors.problems import UserError


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


def test_a_file_that_is_missing_a_folder_a_fifo_or_a_device_is_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("missing", "folder", "fifo", "zero"):
        assert str(tmp_path / name) in refusal(lambda name=name: read_bytes(tmp_path / name)), name


NO_JSON = [b"\xff{}", b"{", b"", b"[" * 100_000, b"1" * 5_000, b"\x00"]
NO_YAML = [b"\xff", b"a: [", b"a: 1\na: 2", b"!!python/object/apply:os.system [true]", b"[" * 20_000]


@pytest.mark.parametrize(
    ("read", "content"), [*((read_object, c) for c in NO_JSON), *((read_yaml, c) for c in NO_YAML)]
)
def test_content_of_another_kind_is_refused(tmp_path: Path, read: Callable[[Path], Any], content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert str(path) in refusal(lambda: read(path))


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
    assert named in refusal(lambda: as_record(Line, found, "line 7"))


def test_a_record_takes_what_fits_and_ignores_what_it_does_not_know() -> None:
    text = '{"step": 3, "loss": 2, "later": "field"}'
    assert as_record(Line, json.loads(text), "line 7") == Line(3, 2.0)
