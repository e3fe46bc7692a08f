"""Reads the documents of one shard of the text.

A document comes in pieces, each followed by others of it or by None, its end, so that a text of any size passes through
bounded memory. The pieces joined are the document, exactly: text is not stripped, and line ends are not translated. A
row without text is its end alone. A mistake is told with file and row. Nothing is dropped: a row that holds more than
one text in the column, or more fields than the header names, is refused. What other columns hold is nobody's matter.

Local files are read here and data sets of the hub by `datasets`, because it is several times slower on files and takes
1 to 2 s to be imported in each process. One large jsonl file is work for several processes here, for one there.
"""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from megalite.config.user_files import refusing
from megalite.data.cuts import PIECE, WIDE, Cut, at_line_end
from megalite.errors.problems import NO_VALUE, Problem, UserError
from megalite.prepare.hub import load_dataset

KINDS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
PACKED = {".gz": "gzip", ".zst": "zstd"}  # may follow any of these; parquet packs itself
READ = 1 << 20  # bytes read at once
REPAIR = "repair the file, copy it again, or give text in UTF-8; data.text_column names the column that holds it"

JSON = json.JSONDecoder(object_pairs_hook=tuple)  # objects are tuples of pairs, which hide no key behind another
PATIENT = json.JSONDecoder(object_pairs_hook=tuple, parse_int=float)  # int() refuses more than 4,300 digits
OF_JSON = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[\]{}]|[^"\[\]{}]++|".*', re.DOTALL)  # strings, brackets, what is between
TEXT_TYPES = ("string", "large_string", "dictionary<values=string", "null")  # of Arrow, as they begin

Row = tuple[int, Any]  # its place (a line's first byte, or the row's number), and a line of JSON or an object


@dataclass(frozen=True)
class Shard:
    """A part of the input that one worker tokenizes. What `start` and `stop` count depends on the kind:

    text: nothing, each of `paths` is one document; json, csv: nothing, a file is one shard; jsonl: bytes, and a line
    belongs to the shard in which it starts; parquet: row groups; rows: rows of a hub data set on disk; stream: `start`
    of `stop` shards of a streamed one.
    `size` is the number of bytes of text, as near as is known before reading.
    """

    kind: str
    paths: tuple[str, ...]
    start: int = 0
    stop: int = sys.maxsize
    size: int = 0
    column: str = "text"
    subset: str | None = None
    split: str = "train"


def pieces(shard: Shard, cut: Cut = at_line_end) -> Iterator[str | None]:
    """The documents of a shard in order, in pieces that `cut` allows; UserError with file and row where one cannot be
    read."""
    if shard.kind == "text":
        for name in shard.paths:
            with refusing(name, REPAIR):
                yield from in_pieces(_text_blocks(Path(name)), cut)
        return
    readers = {"jsonl": _jsonl_rows, "json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    path = Path(shard.paths[0])
    with refusing(path, REPAIR):
        for place, row in readers.get(shard.kind, _hub_rows)(path, shard):
            try:
                text = _text_in(row, shard.column)
            except (ValueError, RecursionError) as error:
                where = f"line {_line_number(path, place):,}" if shard.kind == "jsonl" else f"row {place:,}"
                shown = f"; it begins {row[:80]!r}" if isinstance(row, bytes) else ""
                remedy = _another_column(error.columns) if isinstance(error, _NoTextError) and not place else REPAIR
                raise UserError(Problem(str(path), NO_VALUE, f"{where}: {error}{shown}", remedy, here=True)) from error
            yield from in_pieces([text], cut)


def in_pieces(blocks: Iterable[str], cut: Cut = at_line_end) -> Iterator[str | None]:
    """The document that the blocks are together, in pieces of about PIECE characters, and its end."""
    buffer, sought = "", PIECE  # where to seek the next place: those before are no places
    for block in blocks:
        buffer, start = buffer + block, 0
        while len(buffer) > sought and (stop := cut(buffer, sought)):
            yield buffer[start:stop]
            start, sought = stop, stop + PIECE
        sought = max(sought, len(buffer) - 2 * WIDE) - start
        buffer = buffer[start:]
    if buffer:
        yield buffer
    yield None


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked."""
    if codec := PACKED.get(path.suffix.lower()):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression=codec))
    return path.open("rb")


def _text_blocks(path: Path) -> Iterator[str]:
    """The text of a file, which is one document."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, block = 0, b"\n"
    with opened(path) as file:
        while block:
            block = file.read(READ)
            if (at := block.find(0)) != -1:
                raise ValueError(f"is not UTF-8 text: a zero byte at byte {offset + at:,}")
            pending = len(decoder.getstate()[0])  # bytes of a character that the block before began
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(f"is not UTF-8 text (byte {offset - pending + error.start:,})") from error
            offset += len(block)


class _NoTextError(ValueError):
    """The column is not there, or holds something else; `columns` is what the row holds."""

    def __init__(self, rule: str, columns: dict[str, Any]) -> None:
        super().__init__(rule)
        self.columns = columns


def _text_in(row: Any, column: str) -> str:
    """The text in a row or a line of JSON, empty without one; ValueError where it is no object or names the column
    twice."""
    found = parse_json(row) if isinstance(row, bytes) else row
    if not isinstance(found, dict | tuple):
        raise ValueError(f"holds {type(found).__name__}, not an object like {{{column!r}: '...'}}")
    columns = dict(found)
    if len(columns) < len(found) and [name for name, _ in found].count(column) > 1:
        raise ValueError(f"has the column {column!r} more than once")
    if column not in columns:
        names = ", ".join(map(str, columns))
        raise _NoTextError(f"there is no column {column!r} (data.text_column); it has: {names}", columns)
    text = "" if columns[column] is None else columns[column]
    if not isinstance(text, str):
        kind = "object" if isinstance(text, tuple) else type(text).__name__
        raise _NoTextError(f"column {column!r} holds {kind}, not text", columns)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a character (`\ud83d` alone): it becomes U+FFFD
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _another_column(row: dict[str, Any]) -> str:
    """What to do where the first row has no text in the column: take another one that has."""
    from megalite.config.overrides import typed  # imports Hydra

    names = [name for name, value in row.items() if isinstance(value, str)]
    return ", or ".join(typed("data.text_column", name) for name in names[:3]) or REPAIR


def parse_json(content: bytes) -> Any:
    """The JSON value in `content`, objects as tuples of pairs, whatever the size of its numbers and the depth of what
    lies in the columns of a row."""
    text = content.decode(json.detect_encoding(content), "surrogatepass")
    try:
        return JSON.decode(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError):
        return PATIENT.decode(_shallow(text))


def _shallow(text: str) -> str:
    """The same JSON but for the contents of lists and objects inside two others, which are checked and left out."""
    parts, opened = list[str](), list[int]()  # `opened`: which parts are brackets that are not closed yet
    for token in OF_JSON.finditer(text):
        parts.append(token[0])
        if token[0] in ("[", "{"):
            opened.append(len(parts) - 1)
        elif token[0] in ("]", "}") and opened:
            first = opened.pop()
            if len(opened) > 1:
                PATIENT.decode("".join(parts[first:]))
                parts[first:] = [parts[first] + token[0]]
    return "".join(parts)


def _line_number(path: Path, at: int) -> int:
    """The number of the line that starts at byte `at`; counted only to report a mistake."""
    whole, rest = divmod(at, READ)
    with opened(path) as file:
        return 1 + sum(file.read(size).count(b"\n") for size in (*[READ] * whole, rest))


def _jsonl_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """Each line that starts in [start, stop)."""
    with opened(path) as file:
        at = 0
        if shard.start:
            at = file.seek(shard.start - 1)
            at += len(file.readline())  # the line that began in the shard before
        while at < shard.stop and (line := file.readline()):
            if line.strip():
                yield at, line
            at += len(line)


def is_json_lines(path: Path) -> bool:
    """Whether a .json file holds one object a line (the first is whole), not one value over all of its lines."""
    with opened(path) as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(parse_json(first), tuple)
    except (ValueError, RecursionError):
        return False


def _json_rows(path: Path, _: Shard) -> Iterator[Row]:
    """Each object in a list, or the one object that the file is."""
    with opened(path) as file:
        found = parse_json(file.read())
    yield from enumerate(found if isinstance(found, list) else [found])


def _csv_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """Each row; a quoted text may go over several lines. ValueError where a row has fields that the header does not
    name, or ends before the column: the text was split at a comma or a line end that no quotes guard."""
    csv.field_size_limit(sys.maxsize)  # the module's own is 128 KiB
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        rows, ends = csv.reader(file, strict=True), 0  # `ends`: the line at which the row before does
        try:
            header = next(filter(None, rows), list[str]())
            if header.count(shard.column) > 1:
                raise ValueError(f"line 1: has the column {shard.column!r} more than once")
            needed = header.index(shard.column) + 1 if shard.column in header else 0
            ends, number = rows.line_num, 0
            for row in rows:
                if len(row) > len(header) or (len(row) < needed and any(map(str.strip, row))):
                    counts = f"number of fields: {len(row):,}, in the header: {len(header):,} ({', '.join(header):.80})"
                    quotes = "a text that holds a comma or a line end needs quotes around it"
                    raise ValueError(f"row {number:,} (line {ends + 1:,}): {counts}; {quotes}")
                if row:
                    yield number, dict(zip_longest(header, row))
                    number += 1
                ends = rows.line_num
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"after line {ends:,}: is not csv in UTF-8: {error}") from error


def _parquet_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """The rows of the row groups [start, stop)."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        groups = range(shard.start, min(shard.stop, file.num_row_groups))
        first = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
        columns = [shard.column] if _is_text(file.schema_arrow, shard.column) else None
        yield from _arrow_rows(file.iter_batches(256, list(groups), columns), shard.column, first)


def _hub_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """The rows of a data set that `datasets` reads."""
    rows, first = load_dataset(str(path), shard.subset, shard.split, streaming=shard.kind == "stream"), 0
    from_csv = rows.info.builder_name == "csv"
    if shard.kind == "rows":
        rows, first = rows.select(range(shard.start, shard.stop)), shard.start
    elif shard.stop > 1:
        rows = rows.shard(num_shards=shard.stop, index=shard.start)
    for batch in rows.with_format("arrow").iter(256):
        if from_csv and "__index_level_0__" in batch.schema.names:  # what pandas makes of the fields that have no name
            raise ValueError("the rows of a csv file have more fields than its header")
        yield from _arrow_rows([batch], shard.column, first)
        first += len(batch)


def _arrow_rows(batches: Iterable[Any], column: str, first: int) -> Iterator[Row]:
    """The rows of Arrow tables, numbered from `first` on; all columns where this one is no text."""
    number = first
    for batch in batches:
        is_text = _is_text(batch.schema, column)
        for value in batch.column(column) if is_text else batch.to_pylist():
            try:
                yield number, {column: value.as_py()} if is_text else value
            except UnicodeDecodeError as error:
                raise ValueError(f"row {number:,}: {error}") from error
            number += 1


def _is_text(schema: Any, column: str) -> bool:
    """Whether a column of Arrow tables can be read by itself; ValueError where there are two of that name."""
    places = schema.get_all_field_indices(column)
    if len(places) > 1:
        raise ValueError(f"has the column {column!r} more than once")
    return bool(places) and str(schema.field(places[0]).type).startswith(TEXT_TYPES)
