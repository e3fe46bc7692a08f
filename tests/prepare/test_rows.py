"""A reader drops nothing without a word, and what other columns hold is nobody's matter.

Right values come from Python's csv, or are written down.
"""

import csv
import io
import json
import random
import shlex
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megalite.config.compose import load_config
from megalite.errors.problems import UserError
from megalite.prepare.reading import pieces
from megalite.prepare.sources import Source, sources_of

DEEP = 5_000


def texts(source: Source) -> list[str]:
    """The documents, all shorter than a piece; "" for a row without text."""
    return ["" if text is None else text for shard in source.plan() for text in documents(pieces(shard))]


def documents(found: Iterator[str | None]) -> Iterator[str | None]:
    for piece in found:
        yield piece
        if piece is not None:
            assert next(found) is None


def of_file(path: Path, content: bytes | str) -> Source:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Source("text", (str(path),))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text\nfine\nHello, world, lost, too\n", "row 1 (line 3): number of fields: 4, in the header: 1"),
        ("a.csv", 'id,text\n1,"two\nlines"\n2,a,b\n', "row 1 (line 4): number of fields: 3, in the header: 2"),
        ("a.csv", "id,text\n1,split\nhere\n", "row 1 (line 3): number of fields: 1, in the header: 2"),
        ("a.csv", "text,text\na,b\n", "line 1: has the column 'text' more than once"),
        ("a.csv", 'id,text\n1,a\n2,"never closed\n3,b\n', "after line 2: is not csv"),
        ("a.jsonl", '{"text": "a"}\n{"text": "a", "text": "b"}\n', "line 2: has the column 'text' more than once"),
        ("a.jsonl", '{"te\\u0078t": "a", "text": "b"}\n', "line 1: has the column 'text' more than once"),
        ("a.json", '[{"text": "a", "text": "b"}]', "row 0: has the column 'text' more than once"),
        ("a.jsonl", '{"text": {"text": "a"}}\n', "line 1: column 'text' holds object, not text"),
        ("a.jsonl", '{"n": ' + "[" * DEEP + "]" * (DEEP - 1) + ', "text": "a"}\n', "line 1: "),
        ("a.jsonl", '{"n": ' + "[" * DEEP + "1 2" + "]" * DEEP + ', "text": "a"}\n', "line 1: Expecting ',' delimiter"),
        ("a.jsonl", '{"n": ' + "[" * DEEP + '"' + '\\"' * 500_000, "line 1: "),  # read once, not once a quote
    ],
    ids=lambda value: value[:40],
)
def test_what_would_be_lost_is_refused_with_its_row(tmp_path: Path, name: str, content: str, words: str) -> None:
    source = of_file(tmp_path / name, content)
    with pytest.raises(UserError) as refusal:
        texts(source)
    assert f"{name}: {words}" in str(refusal.value)


def test_two_parquet_columns_of_the_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has the column 'text' more than once"):
        texts(Source("text", (str(tmp_path / "a.parquet"),)))


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


def number(dice: random.Random) -> str:
    digits = "".join(dice.choices("0123456789", k=dice.choice([1, 30, 4301, 9000]))).lstrip("0") or "0"
    return dice.choice(["", "-"]) + digits + dice.choice(["", "", ".5", "e400", "E+2", "e-999"])


def value(dice: random.Random, depth: int = 0) -> str:
    """Valid JSON for a column that nobody reads."""
    kind = dice.randrange(9 if depth < 4 else 6)
    if kind < 2:
        return number(dice)
    if kind < 6:
        odd = ['"\\ud800"', '"\\"]}\\\\"', "null", "true", "-0", "NaN", "-Infinity", '"' + "[" * 50 + '"', '"text"']
        return dice.choice(odd)
    if kind == 6:
        return "[" * DEEP + value(dice, 4) + "]" * DEEP if depth == 0 else "[" + value(dice, depth + 1) + "]"
    if kind == 7:
        return f'{{"text": {value(dice, depth + 1)}, "text": {value(dice, depth + 1)}}}'
    return '{"a":' * DEEP + "{}" + "}" * DEEP if depth == 0 else f"[{value(dice, 4)}, {value(dice, depth + 1)}]"


def test_columns_that_nobody_reads_may_hold_any_json(tmp_path: Path) -> None:
    dice = random.Random(3)
    expected, lines = [], []
    for at in range(60):
        text = dice.choice([f'say "hi" {at} é', "[{]}\\", "\u2028\0\x7f"])
        fields = [f'"{name}": {value(dice)}' for name in ("n", "n", "x")]
        fields.insert(dice.randrange(4), f'"text":{json.dumps(text)}')
        expected.append(text)
        lines.append("{" + ", ".join(fields) + "}")
    mark = dice.choice(["", "\ufeff"])
    assert texts(of_file(tmp_path / "a.jsonl", mark + "\r\n".join(lines))) == expected
    assert texts(of_file(tmp_path / "b.json", "\n".join(lines))) == expected
    assert texts(of_file(tmp_path / "c.json", "[" + ",\n".join(lines) + "]")) == expected


@pytest.mark.parametrize("column", ["content", "my column", "a;b", "007", "null", "it's", 'say "é"', "${x}", "a=b,c"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet"])
def test_the_column_that_has_text_is_the_remedy_and_the_remedy_works(tmp_path: Path, kind: str, column: str) -> None:
    path = tmp_path / f"a.{kind}"
    rows = [{column: "one", "id": 1}, {column: "two", "id": 2}]
    if kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[column], ["one"], ["two"]])
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([{**row, "text": 1} for row in rows]), path)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    words = ["data=text", f"data.path={path}"]
    (source,) = sources_of(load_config(words, 1).data)
    with pytest.raises(UserError) as refusal:
        source.plan()
    (problem,) = refusal.value.problems
    assert column in problem.rule or kind == "parquet"
    (remedy,) = shlex.split(problem.hint)
    (source,) = sources_of(load_config([*words, remedy], 1).data)
    assert texts(source) == ["one", "two"]


def test_a_row_in_the_middle_is_no_reason_to_read_another_column(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        texts(of_file(tmp_path / "a.jsonl", '{"text": "a"}\n{"body": "b"}\n'))
    (problem,) = refusal.value.problems
    assert "line 2: there is no column 'text' (data.text_column); it has: body" in problem.rule
    assert "data.text_column=body" not in problem.hint


def test_several_columns_of_text_are_all_offered(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fix: data\.text_column=title, or data\.text_column=body"):
        texts(of_file(tmp_path / "a.jsonl", '{"title": "a", "id": 3, "body": "b", "tags": ["x"]}\n'))


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
