"""A reader drops nothing without a word.

Right values come from Python's csv, or are written down.
"""

import csv
import io
import random
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megalite.errors.problems import UserError
from megalite.prepare.sources import Source, pieces


def texts(source: Source) -> list[str]:
    """The documents, all shorter than a piece; "" for a row without text."""
    found = [piece for shard in source.plan() for piece in pieces(shard)]
    assert all(piece.last for piece in found)
    return [piece.text for piece in found]


def of_file(path: Path, content: bytes | str) -> Source:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Source("text", (str(path),))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text\nfine\nHello, world, lost, too\n", "row 1 has more or fewer fields"),
        ("a.csv", 'id,text\n1,"two\nlines"\n2,a,b\n', "row 1 has more or fewer fields"),
        ("a.csv", "id,text\n1,split\nhere\n", "row 1 has more or fewer fields"),
        ("a.csv", "text,text\na,b\n", "there must be one column 'text' (data.text_column); it has: text, text"),
        ("a.csv", 'id,text\n1,a\n2,"never closed\n3,b\n', "row 1 is not csv"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}\n', "line 2: there must be one column 'text' (data.text_column)"),
        ("a.jsonl", '{"text": {"text": "a"}}\n', "line 1: column 'text' holds dict, not text"),
        ("a.jsonl", '{"n": ' + "[" * 5000 + "]" * 5000 + ', "text": "a"}\n', "line 1: "),
        ("a.jsonl", '{"text": "a"}\n{"n": ' + "1" * 5000 + ', "text": "b"}\n', "line 2: Exceeds the limit"),
    ],
    ids=lambda value: value[:40],
)
def test_what_would_be_lost_is_refused_with_its_row(tmp_path: Path, name: str, content: str, words: str) -> None:
    source = of_file(tmp_path / name, content)
    with pytest.raises(UserError) as refusal:
        texts(source)
    assert f"{name}: {words}" in str(refusal.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_csv_data_set_whose_rows_pandas_would_cut_is_refused(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas takes fields that the header does not name for an index, where all rows have them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf-cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("text\nHello, world\nHello, you\n")
    with pytest.raises(UserError, match="more fields than its header"):
        texts(Source("hf", (str(tmp_path / "set"),), streaming=streaming))


def test_csv_gives_what_python_s_own_reader_gives(tmp_path: Path) -> None:
    dice = random.Random(5)
    alphabet = ["a", " ", ",", '"', "\n", "\r", "\r\n", "é", "\0", "\x0c", "\u2028", "\ufeff", "'", ";"]
    rows = [["id", "text", "note"]]
    rows += [["".join(dice.choices(alphabet, k=dice.randrange(12))) for _ in range(3)] for _ in range(400)]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        out = io.StringIO()
        csv.writer(out, quoting=quoting).writerows(rows)
        expected = [row[1] for row in csv.reader(io.StringIO(out.getvalue(), newline=""))][1:]
        assert expected == [row[1] for row in rows[1:]]
        for mark in ("", "\ufeff"):
            assert texts(of_file(tmp_path / "a.csv", mark + out.getvalue())) == expected
    short = "text,id\na,1\n\n  \nb\n"  # a row that has its text may end early, a blank one holds nothing
    assert texts(of_file(tmp_path / "a.csv", short)) == ["a", "  ", "b"]


def test_arrow_columns_of_every_kind_of_text_are_read_and_others_refused(tmp_path: Path) -> None:
    values, path = ["a", None, "é"], tmp_path / "a.parquet"
    plain = pyarrow.array(values)
    for column in (plain, plain.cast("large_string"), plain.cast("string_view"), plain.dictionary_encode()):
        parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": column}), path)
        assert texts(Source("text", (str(path),))) == ["a", "", "é"]
    for column in (plain.cast("binary"), pyarrow.array([["a"]] * 3), pyarrow.array([{"a": "b"}] * 3)):
        parquet.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(UserError, match="row 0: column 'text' holds"):
            texts(Source("text", (str(path),)))
    parquet.write_table(pyarrow.table({"text": pyarrow.array([None] * 299 + [b"a"])}), path)
    with pytest.raises(UserError, match="row 299: column 'text' holds bytes"):
        texts(Source("text", (str(path),)))
    parquet.write_table(pyarrow.Table.from_arrays([plain, plain], names=["text", "text"]), path)
    with pytest.raises(UserError, match="there must be one column 'text'"):
        texts(Source("text", (str(path),)))
