"""Every source gives its documents exactly, in one order, however it is cut into shards."""

import gzip
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megalite.errors.problems import UserError
from megalite.prepare import sources
from megalite.prepare.cuts import PIECE, behind_a_word, in_pieces
from megalite.prepare.sources import Shard, Source, pieces


def texts(source: Source) -> list[str]:
    """The documents with text, each whole."""
    shards = [itertools.groupby(pieces(shard), lambda piece: piece.document) for shard in source.plan()]
    found = ["".join(piece.text for piece in document) for shard in shards for _, document in shard]
    return [text for text in found if text]


def write_jsonl(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_text_file_is_one_document_kept_to_the_byte(tmp_path: Path) -> None:
    content = "\ufeff  first\r\n\r\nlast, no line end \t"
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert texts(Source("text", (str(tmp_path / "a.txt"),))) == [content]


def test_the_standard_library_is_real_code_without_tests_and_packages() -> None:
    files = [str(path) for path in Source("stdlib").files]
    assert any(path.endswith("/argparse.py") for path in files)
    assert not any("site-packages" in path or "/test/" in path or "/idlelib/" in path for path in files)
    assert files == [str(path) for path in Source("stdlib").files]
    assert sum(shard.size for shard in Source("stdlib").plan()) > 5_000_000
    assert Source("stdlib").label == f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"


def test_a_folder_a_glob_and_a_list_give_the_same_sorted_documents(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "notes.pdf").write_bytes(b"\x00")
    for paths in ([str(tmp_path)], [str(tmp_path / "*.txt")], [str(tmp_path / f"{name}.txt") for name in "abc"]):
        assert texts(Source("text", tuple(paths))) == ["a", "b", "c"]


def packed(content: bytes, codec: str) -> bytes:
    return pyarrow.compress(content, codec=codec, asbytes=True) if codec == "zstd" else gzip.compress(content)


def test_a_folder_gives_the_documents_of_all_text_formats(tmp_path: Path) -> None:
    lines = b'{"text": "%s"}\n\n{"text": "z"}\n'
    contents = {
        "a.jsonl": lines % b"a",
        "b.jsonl.gz": packed(lines % b"b", "gzip"),
        "c.json": lines % b"c",
        "d.TXT": b"d",
        "e.ndjson": lines % b"e",
        "f.JSONL.zst": packed(lines % b"f", "zstd"),
        "g.json": lines % b"g",
        "h.csv": b'id,text\n1,"h, and\nmore"\n2,' + b"x" * 200_000 + b"\n",
        "i.txt.gz": packed(b"i", "gzip"),
        "j.csv.zst": packed(b"text\nj\n", "zstd"),
        "k.json.gz": packed(b'{"text": "k"}', "gzip"),
        "notes.pdf": b"\x00",
        "README": b"read me",
        "old.pdf": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    parquet.write_table(pyarrow.table({"text": ["l"]}), tmp_path / "l.Parquet")
    source = Source("text", (str(tmp_path),))
    found = [*"azbzczdezfzgz", "h, and\nmore", "x" * 200_000, *"ijkl"]
    assert texts(source) == found


def test_links_are_followed_and_no_folder_is_read_twice(tmp_path: Path) -> None:
    for name in ("corpus/inside", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "inside" / "back").symlink_to(tmp_path / "corpus")
    assert texts(Source("text", (str(tmp_path / "corpus"),))) == ["corpus/inside", "elsewhere"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_folder_that_cannot_be_looked_into_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o755)
        Path(folder, "a.txt").write_text("x")
        Path(folder, "closed").mkdir(mode=0)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=r"closed': cannot be looked into \(Permission denied\)"):
                Source("text", (folder,)).identity()
        finally:
            os.seteuid(0)


def test_missing_and_empty_texts_are_skipped_and_half_characters_mended(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": None}, {"text": ""}, {"text": "a\ud83d"}, {"text": "b"}])
    (shard,) = Source("text", (str(tmp_path / "a.jsonl"),)).plan()
    assert [piece.text for piece in pieces(shard)] == ["", "", "a\ufffd", "b"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("size", [1, 7, 100, 2000, 10**9])
def test_rows_are_read_once_whatever_the_shards(
    tmp_path: Path, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, path = [f"row {number} é\n" * (number % 4 + 9) for number in range(100)], tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, [{"id": number, "content": row} for number, row in enumerate(rows)])
    else:
        parquet.write_table(pyarrow.table({"id": range(100), "content": rows}), path, row_group_size=9)
    monkeypatch.setattr(sources, "SMALLEST", size)
    monkeypatch.setattr(sources, "LARGEST", size)
    source = Source("text", (str(path),), column="content")
    assert (len(source.plan()) > 5) == (size < 10**9)
    assert texts(source) == rows


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
    monkeypatch.setattr(sources, "SMALLEST", 50)
    monkeypatch.setattr(sources, "LARGEST", 50)
    source = Source("hf", (str(folder),), streaming=streaming)
    assert len(source.plan()) > 1
    assert texts(source) == [f"{number}.{row}" for number in range(3) for row in range(4)]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_that_was_saved_to_disk_is_read(tmp_path: Path, streaming: bool) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "set")
    assert texts(Source("hf", (str(tmp_path / "set"),), streaming=streaming)) == ["one", "two"]
    for choice in ({"split": "test"}, {"subset": "web"}):
        with pytest.raises(UserError, match="saved with the splits train and no subsets"):
            texts(Source("hf", (str(tmp_path / "set"),), streaming=streaming, **choice))
    rows.save_to_disk(tmp_path / "part")
    assert texts(Source("hf", (str(tmp_path / "part"),), streaming=streaming)) == ["one", "two"]


def test_pieces_of_a_long_text_join_to_the_text_and_begin_behind_a_word(tmp_path: Path) -> None:
    line = "some words of text, and é\n  indented\n\nafter a gap\n"
    content = line * (3 * PIECE // len(line))
    (tmp_path / "a.txt").write_text(content)
    found = list(pieces(Shard("text", (str(tmp_path / "a.txt"),))))
    assert len(found) > 2
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert "".join(piece.text for piece in found) == content
    for piece, after in itertools.pairwise(found):
        assert piece.text.endswith(after.before)
        assert piece.text[-1].isalnum()
        assert after.text[0].isspace()
    assert list(in_pieces([content], behind_a_word, 0)) == found


def test_a_changed_file_has_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    source = Source("text", (str(path),))
    before = source.identity()
    assert source.identity() == before
    path.write_text("two")
    assert source.identity() != before
