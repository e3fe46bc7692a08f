"""Bad data is refused with the place and a way out: what the rows of test_bad_inputs_of_data.py leave out."""

import json
from pathlib import Path

import pytest

from megalite.config.schema import Config
from megalite.data.open import open_data
from megalite.errors.problems import UserError
from megalite.prepare.prepare import prepare

LINES = '{"text": "a"}\n' * 3
CASES: dict[str, tuple[str, bytes | str, str]] = {
    "character cut at the end": ("a.txt", "é".encode() * 3_000_000 + b"\xc3", "byte 6,000,000"),
    "json that is no object": ("a.jsonl", LINES + "[1]\n", r"a\.jsonl: line 4: holds list, not an object"),
    "json without the column": (
        "a.jsonl",
        '{"body": "x", "id": 1}\n',
        "line 1: there is no column 'text' .data.text_column.; it has: body, id",
    ),
    "json with a number as text": ("a.jsonl", '{"text": 5}\n', r"a\.jsonl: line 1: column 'text' holds int, not text"),
    "csv without the column": (
        "a.csv",
        "body,id\nx,1\n",
        "there is no column 'text' .data.text_column.; it has: body, id",
    ),
    "text that is no parquet": ("a.parquet", "x", r"a\.parquet: Parquet file size is 1 bytes"),
    "validation smaller than one sample": (
        "a.txt",
        "x" * 60,
        r"data\.validation_fraction.*7 validation tokens \(of 61\)[\s\S]*data\.validation_fraction=0\.5, or more text",
    ),
}


def write(config: Config, path: Path, content: bytes | str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    config.data.path = str(path)


@pytest.mark.parametrize("case", list(CASES))
def test_bad_data_is_refused(case: str, tmp_path: Path, config: Config) -> None:
    name, content, message = CASES[case]
    write(config, tmp_path / name, content)
    with pytest.raises(UserError, match=message):
        open_data(config, prepare(config))


def test_a_mistake_found_by_a_worker_process_comes_back_as_one(tmp_path: Path, config: Config) -> None:
    good = "".join(json.dumps({"text": "word " * 50}) + "\n" for _ in range(10_000))
    (tmp_path / "a.jsonl").write_text(good + "oops\n" + good)
    config.data.path, config.data.workers = str(tmp_path / "a.jsonl"), 2
    with pytest.raises(UserError, match=r"a\.jsonl: line 10,001: Expecting value"):
        prepare(config)


def test_all_bad_files_are_named_at_once(tmp_path: Path, config: Config) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\x00")
    config.data.path = [str(tmp_path / "*.txt"), str(tmp_path / "gone")]
    with pytest.raises(UserError, match="gone"):
        prepare(config)
    config.data.path = [str(tmp_path / "empty.txt"), str(tmp_path / "binary.txt")]
    with pytest.raises(UserError) as refusal:
        prepare(config)
    assert len(refusal.value.problems) == 2


def test_an_unreadable_file_is_refused(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    write(config, tmp_path / "a.txt", "x" * 1000)
    opened = Path.open

    def refuse(self: Path, *args: object, **settings: object) -> object:
        if self.name == "a.txt":
            raise PermissionError(13, "Permission denied")  # a test that runs as root cannot lack permission
        return opened(self, *args, **settings)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"a\.txt.*cannot be read: Permission denied"):
        prepare(config)


def test_a_full_disk_is_said_plainly(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from megalite.prepare.token_writer import TokenWriter

    def full(self: object, tokens: object) -> None:
        raise OSError(28, "No space left on device")

    write(config, tmp_path / "a.txt", "x" * 1000)
    monkeypatch.setattr(TokenWriter, "add", full)
    with pytest.raises(UserError, match=r"No space left[\s\S]*is kept"):
        prepare(config)


def test_text_that_changed_after_preparing_is_not_taken_for_prepared(tmp_path: Path, config: Config) -> None:
    write(config, tmp_path / "a.txt", "x" * 1000)
    before = prepare(config).prefixes
    (tmp_path / "a.txt").write_text("y" * 1001)
    assert open_data(config, prepare(config)).train.parts[0].file.prefix not in before
