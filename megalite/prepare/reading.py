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
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from megalite.config.user_files import refusing
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
PIECE = 1 << 20  # characters after which a document is cut
FAR = 1 << 14  # characters on each side of a cut in which it must not matter
REPAIR = "repair the file, copy it again, or give text in UTF-8; data.text_column names the column that holds it"
JSON = json.JSONDecoder(object_pairs_hook=tuple)  # objects are tuples of pairs, which hide no key behind another

Cut = Callable[[str, int], int]  # of a text: a place at or behind that one where it may be cut, 0 for none
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


def pieces(shard: Shard, cut: Cut = line_end) -> Iterator[str | None]:
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
                raise ValueError(f"{where}: {error}") from error
            yield from in_pieces([text], cut)


def in_pieces(blocks: Iterable[str], cut: Cut = line_end) -> Iterator[str | None]:
    """The document that the blocks are together, in pieces of about PIECE characters, and its end."""
    buffer, sought = "", PIECE  # where to seek the next place: those before are no places
    for block in blocks:
        buffer, start = buffer + block, 0
        while len(buffer) > sought and (stop := cut(buffer, sought)):
            yield buffer[start:stop]
            start, sought = stop, stop + PIECE
        sought = max(sought, len(buffer) - 2 * FAR) - start
        buffer = buffer[start:]
    if buffer:
        yield buffer
    yield None


def line_end(text: str, start: int) -> int:
    """The next place in front of a line end that follows a letter or digit; 0 for none."""
    while (at := text.find("\n", start)) != -1:
        at -= text[at - 1 : at] == "\r"
        if at and text[at - 1].isalnum():
            return at
        start = at + 2
    return 0


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
        raise ValueError(f"there is no column {column!r} (data.text_column); it has: {', '.join(map(str, columns))}")
    text = "" if columns[column] is None else columns[column]
    if not isinstance(text, str):
        kind = "object" if isinstance(text, tuple) else type(text).__name__
        raise ValueError(f"column {column!r} holds {kind}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a character (`\ud83d` alone): it becomes U+FFFD
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def parse_json(content: bytes) -> Any:
    """The JSON value in `content`, objects as tuples of pairs."""
    return JSON.decode(content.decode(json.detect_encoding(content), "surrogatepass"))


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


def is_list(path: Path) -> bool:
    """Whether a .json file holds a list of objects, not one object a line."""
    with opened(path) as file:
        return file.read(READ).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _json_rows(path: Path, _: Shard) -> Iterator[Row]:
    """Each object in a list."""
    with opened(path) as file:
        yield from enumerate(parse_json(file.read()))


def _csv_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """Each row; a quoted text may go over several lines. ValueError where a row has fields that the header does not
    name, or ends before the column: the text was split at a comma or a line end that no quotes guard."""
    csv.field_size_limit(sys.maxsize)  # the module's own is 128 KiB
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(filter(None, rows), list[str]())
            if header.count(shard.column) > 1:
                raise ValueError(f"line 1: has the column {shard.column!r} more than once")
            needed = header.index(shard.column) + 1 if shard.column in header else 0
            for number, row in enumerate(filter(None, rows)):
                if len(row) > len(header) or (len(row) < needed and any(map(str.strip, row))):
                    counts = f"number of fields: {len(row):,}, in the header: {len(header):,}"
                    quotes = "a text that holds a comma or a line end needs quotes around it"
                    raise ValueError(f"row {number:,} (up to line {rows.line_num:,}): {counts}; {quotes}")
                yield number, dict(zip_longest(header, row))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"up to line {rows.line_num:,}: is not csv in UTF-8: {error}") from error


def _parquet_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """The rows of the row groups [start, stop)."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        _check_names(file.schema_arrow.names, shard.column)
        groups = [*range(shard.start, min(shard.stop, file.num_row_groups))]
        first = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
        yield from _arrow_rows(file.iter_batches(256, groups, [shard.column]), shard.column, first)


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
        _check_names(batch.schema.names, shard.column)
        yield from _arrow_rows([batch], shard.column, first)
        first += len(batch)


def _arrow_rows(batches: Iterable[Any], column: str, first: int) -> Iterator[Row]:
    """The rows of a column of Arrow tables, numbered from `first` on."""
    number = first
    for batch in batches:
        for value in batch.column(column):
            try:
                yield number, {column: value.as_py()}
            except UnicodeDecodeError as error:
                raise ValueError(f"row {number:,}: {error}") from error
            number += 1


def _check_names(names: Sequence[str], column: str) -> None:
    """ValueError unless one of the columns of a table has this name."""
    if names.count(column) != 1:
        rule = f"has the column {column!r} more than once" if column in names else f"there is no column {column!r}"
        raise ValueError(f"{rule} (data.text_column); it has: {', '.join(names)}")
