"""Everything that can be wrong with data is refused with the place and a way out."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megalite.config.problems import UserError
from megalite.config.schema import Config
from megalite.data.open import open_data
from megalite.data.prepare import prepare

Arrange = Callable[[Path, Config], None]


def text(content: str | bytes, name: str = "a.txt") -> Arrange:
    def arrange(folder: Path, config: Config) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        config.data.path = str(folder / name)

    return arrange


def path(name: object) -> Arrange:
    def arrange(folder: Path, config: Config) -> None:
        config.data.path = str(folder / name) if isinstance(name, str) else name

    return arrange


def folder_of_pdfs(folder: Path, config: Config) -> None:
    (folder / "papers").mkdir()
    (folder / "papers" / "a.pdf").write_bytes(b"x")
    config.data.path = str(folder / "papers")


def cut_parquet(folder: Path, config: Config) -> None:
    good_parquet(folder, config)
    content = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(content[: len(content) // 2])


def flipped_parquet(folder: Path, config: Config) -> None:
    good_parquet(folder, config)
    content = bytearray((folder / "a.parquet").read_bytes())
    content[4:60] = bytes(56)  # the first page's header
    (folder / "a.parquet").write_bytes(content)


def good_parquet(folder: Path, config: Config) -> None:
    parquet.write_table(pyarrow.table({"text": ["abc" * 50] * 100}), folder / "a.parquet")
    config.data.path = str(folder / "a.parquet")


def parquet_of(column: str, values: list[object]) -> Arrange:
    def arrange(folder: Path, config: Config) -> None:
        parquet.write_table(pyarrow.table({column: values}), folder / "a.parquet")
        config.data.path = str(folder / "a.parquet")

    return arrange


def with_setting(arrange: Arrange, **settings: object) -> Arrange:
    def both(folder: Path, config: Config) -> None:
        arrange(folder, config)
        for name, value in settings.items():
            group = next(group for group in (config.data, config.train, config.model, config) if hasattr(group, name))
            setattr(group, name, value)

    return both


LINES = '{"text": "a"}\n' * 3
CASES: dict[str, tuple[Arrange, str]] = {
    "no path": (path(None), r"data\.path=null: data=text needs a path"),
    "missing": (path("gone.txt"), "there is no such file or folder"),
    "empty": (text(""), r"a\.txt.*is empty \(0 bytes\)"),
    "glob without match": (path("*.nothing"), "the glob matches no file"),
    "folder without text": (folder_of_pdfs, r"holds no \.txt, \.jsonl, \.parquet file; it holds: \.pdf"),
    "zero byte": (text(b"text" * 10 + b"\x00"), r"a\.txt.*a zero byte at byte offset 40"),
    "invalid utf-8": (text(b"0123456789\xff"), "an invalid byte at byte offset 10"),
    "invalid utf-8 deep inside": (text(b"line of text\n" * 200_000 + b"\xff"), "byte offset 2,600,000"),
    "character cut at the end": (text("é".encode() * 3_000_000 + b"\xc3"), "byte offset 6,000,000"),
    "bad json line": (
        text(LINES + '{"text": \n' + LINES, "a.jsonl"),
        r"a\.jsonl:4'.*is not a line of JSON.*'{\"text\":'",
    ),
    "json that is no object": (text(LINES + "[1]\n", "a.jsonl"), r"a\.jsonl:4'.*holds list, not an object"),
    "json without the column": (text('{"body": "x", "id": 1}\n', "a.jsonl"), "data.text_column='text'.*has: body, id"),
    "json with a number as text": (text('{"text": 5}\n', "a.jsonl"), r"holds int, not text.*a\.jsonl:1"),
    "only empty documents": (text('{"text": ""}\n', "a.jsonl"), "holds no text at all"),
    "parquet without the column": (parquet_of("body", ["x"]), r"has: body[\s\S]*data\.text_column=body"),
    "parquet with numbers": (parquet_of("text", [1, 2]), "holds int64, not text"),
    "truncated parquet": (cut_parquet, r"a\.parquet.*is not a whole parquet file"),
    "damaged parquet": (flipped_parquet, r"a\.parquet.*is damaged in row groups 0 to 0"),
    "text that is no parquet": (text("x", "a.parquet"), "is not a whole parquet file"),
    "smaller than one sample": (text("x" * 10), r"9 training tokens \(of 11\) are less than one sample of 17"),
    "validation smaller than one sample": (
        text("x" * 60),
        r"7 validation tokens \(of 61\)[\s\S]*data\.validation_fraction=0\.296 or more, or train\.eval_interval=0",
    ),
    "vocabulary smaller than the tokenizer's": (
        with_setting(text("x" * 1000), vocab_size=200),
        r"model\.vocab_size=200: the tokenizer has 257 tokens",
    ),
    "weights of another number": (with_setting(text("x" * 1000), weights=[0.5, 0.5]), "2 weights for 1 paths"),
    "a weight of nothing": (with_setting(text("x" * 1000), weights=[0.0]), "weights must be above 0"),
    "masking what char has not": (
        with_setting(text("x" * 1000), tokenizer="char", mask_end_of_document=True),
        "has no end-of-document token",
    ),
    "tokenizer folder missing": (with_setting(text("x" * 1000), tokenizer="./none"), "there is no such folder"),
    "tokenizer on the hub": (with_setting(text("x" * 1000), tokenizer="gpt2"), "to work offline"),
    "cache that is a file": (with_setting(text("x" * 1000), cache_dir=__file__), "data.cache_dir=.*cannot be written"),
    "token file missing": (with_setting(path("gone"), source="tokens"), r"gone\.bin.*is missing"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_bad_data_is_refused(case: str, workers: int, tmp_path: Path, config: Config) -> None:
    arrange, message = CASES[case]
    config.data.workers = workers
    arrange(tmp_path, config)
    with pytest.raises(UserError, match=message):
        prepare_and_open(config)


def prepare_and_open(config: Config) -> None:
    prepare(config)
    open_data(config)


def test_a_mistake_found_by_a_worker_process_comes_back_as_one(tmp_path: Path, config: Config) -> None:
    good = "".join(json.dumps({"text": "word " * 50}) + "\n" for _ in range(10_000))
    (tmp_path / "a.jsonl").write_text(good + "oops\n" + good)
    config.data.path, config.data.workers = str(tmp_path / "a.jsonl"), 2
    with pytest.raises(UserError, match=r"a\.jsonl:10001'.*is not a line of JSON"):
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
    text("x" * 1000)(tmp_path, config)
    opened = Path.open

    def refuse(self: Path, *args: object, **settings: object) -> object:
        if self.name == "a.txt":
            raise PermissionError(13, "Permission denied")  # a test that runs as root cannot lack permission
        return opened(self, *args, **settings)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"a\.txt.*cannot be read \(Permission denied\)"):
        prepare(config)


def test_a_full_disk_is_said_plainly(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from megalite.data.token_writer import TokenWriter

    def full(self: object, tokens: object) -> None:
        raise OSError(28, "No space left on device")

    text("x" * 1000)(tmp_path, config)
    monkeypatch.setattr(TokenWriter, "add", full)
    with pytest.raises(UserError, match=r"no space left[\s\S]*is kept"):
        prepare(config)


def test_text_that_changed_after_preparing_is_not_taken_for_prepared(tmp_path: Path, config: Config) -> None:
    text("x" * 1000)(tmp_path, config)
    prepare(config)
    (tmp_path / "a.txt").write_text("y" * 1001)
    with pytest.raises(UserError, match="is not prepared, or its files changed"):
        open_data(config)
