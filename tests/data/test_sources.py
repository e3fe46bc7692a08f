"""Every source gives its documents exactly, in one order, however it is cut into shards."""

import itertools
import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megalite.data import reading, sources
from megalite.data.reading import PIECE, Shard, documents, pieces
from megalite.data.sources import Source


def texts(source: Source) -> list[str]:
    return [text for shard in source.plan() for text in documents(shard)]


def write_jsonl(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_text_file_is_one_document_kept_to_the_byte(tmp_path: Path) -> None:
    content = "\ufeff  first\r\n\r\nlast, no line end \t"
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert texts(Source("text", (str(tmp_path / "a.txt"),))) == [content]


def test_the_standard_library_is_real_code_without_tests_and_packages() -> None:
    files = [str(path) for path in sources.library_files()]
    assert any(path.endswith("/argparse.py") for path in files)
    assert not any("site-packages" in path or "/test/" in path or "/idlelib/" in path for path in files)
    assert files == [str(path) for path in sources.library_files()]
    assert sum(shard.size for shard in Source("stdlib").plan()) > 5_000_000
    assert Source("stdlib").label == f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"


def test_a_folder_a_glob_and_a_list_give_the_same_sorted_documents(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "notes.pdf").write_bytes(b"\x00")
    for paths in ([str(tmp_path)], [str(tmp_path / "*.txt")], [str(tmp_path / f"{name}.txt") for name in "abc"]):
        assert texts(Source("text", tuple(paths))) == ["a", "b", "c"]


@pytest.mark.parametrize("size", [1, 7, 40, 100, 10_000])
def test_jsonl_lines_are_read_once_whatever_the_shards(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"document {number} é\n" * (number % 4 + 1), "id": number} for number in range(30)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(sources, "shard_size", lambda total: size)
    assert texts(Source("text", (str(tmp_path / "a.jsonl"),))) == [row["text"] for row in rows]


def test_missing_and_empty_texts_are_skipped_and_half_characters_mended(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": None}, {"text": ""}, {"text": "a\ud83d"}, {"text": "b"}])
    (shard,) = Source("text", (str(tmp_path / "a.jsonl"),)).plan()
    assert [piece.text for piece in pieces(shard)] == [None, None, "a\ufffd", "b"]


@pytest.mark.parametrize("size", [1, 2000, 10**9])
def test_parquet_rows_are_read_once_whatever_the_shards(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"row {number}" * 20 for number in range(100)]
    table = pyarrow.table({"id": range(100), "content": rows})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    monkeypatch.setattr(sources, "shard_size", lambda total: size)
    assert texts(Source("text", (str(tmp_path / "a.parquet"),), column="content")) == rows


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hubs_kind_is_read_through_datasets(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder stands in for a hub name: the library treats both alike."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    folder = tmp_path / "org-name"
    folder.mkdir()
    for number in range(3):
        write_jsonl(folder / f"train-{number}.jsonl", [{"text": f"{number}.{row}"} for row in range(4)])
    monkeypatch.setattr(sources, "shard_size", lambda total: 50)
    source = Source("hf", (str(folder),), streaming=streaming)
    assert len(source.plan()) > 1
    assert texts(source) == [f"{number}.{row}" for number in range(3) for row in range(4)]


def test_pieces_of_a_long_text_join_to_the_text_and_begin_at_line_ends(tmp_path: Path) -> None:
    line = "some words of text, and é\n  indented\n\nafter a gap\n"
    content = line * (3 * PIECE // len(line))
    (tmp_path / "a.txt").write_text(content)
    found = list(pieces(Shard("text", (str(tmp_path / "a.txt"),))))
    assert len(found) > 2
    assert "".join(piece.text or "" for piece in found) == content
    assert [piece.ends_document for piece in found] == [False] * (len(found) - 1) + [True]
    for before, after in itertools.pairwise(found):
        assert (before.text or "")[-1].isalnum()
        assert (after.text or "").startswith("\n")
    assert "".join(reading.cut(content)) == content


def test_a_changed_file_has_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    source = Source("text", (str(path),))
    before = source.identity()
    assert source.identity() == before
    path.write_text("two")
    assert source.identity() != before
