"""Reads the documents of one shard of the text.

A document comes in pieces, each followed by others of it or by None, its end, so that a text of any size passes through
bounded memory. The pieces joined are the document, exactly: text is not stripped, and line ends are not translated. A
row without text is its end alone. A mistake is told with file and row.

Local files are read here and data sets of the hub by `datasets`, because it is several times slower on files and takes
1 to 2 s to be imported in each process. One large jsonl file is work for several processes here, for one there.
"""

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megalite.config.user_files import refusing
from megalite.data.cuts import PIECE, WIDE, Cut, at_line_end
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
                text = _text_of(row, shard.column)
            except (ValueError, RecursionError) as error:
                where = f"line {_line_number(path, place):,}" if shard.kind == "jsonl" else f"row {place:,}"
                shown = f"; it begins {row[:80]!r}" if isinstance(row, bytes) else ""
                raise ValueError(f"{where}: {error}{shown}") from error
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


def _text_of(row: Any, column: str) -> str:
    """The text in a row, empty without one; ValueError if the row is no object or its column no text."""
    found = json.loads(row) if isinstance(row, bytes) else row
    if not isinstance(found, dict):
        raise ValueError(f"holds {type(found).__name__}, not an object like {{{column!r}: '...'}}")
    if column not in found:
        raise ValueError(f"there is no column {column!r} (data.text_column); it has: {', '.join(map(str, found))}")
    text = "" if found[column] is None else found[column]
    if not isinstance(text, str):
        raise ValueError(f"column {column!r} holds {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a character (`\ud83d` alone): it becomes U+FFFD
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _line_number(path: Path, at: int) -> int:
    """Which line starts at byte `at`; counted only to report a mistake."""
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
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json_rows(path: Path, _: Shard) -> Iterator[Row]:
    """Each object in a list, or the one object that the file is."""
    with opened(path) as file:
        found = json.load(file)
    yield from enumerate(found if isinstance(found, list) else [found])


def _csv_rows(path: Path, _: Shard) -> Iterator[Row]:
    """Each row; a quoted text may go over several lines."""
    csv.field_size_limit(sys.maxsize)  # the module's own is 128 KiB
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            yield from enumerate(rows)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"after line {rows.line_num:,}: is not csv in UTF-8: {error}") from error


def _parquet_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """The rows of the row groups [start, stop)."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        groups = range(shard.start, min(shard.stop, file.num_row_groups))
        first = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
        columns = [shard.column] if shard.column in file.schema_arrow.names else None
        yield from _arrow_rows(file.iter_batches(256, list(groups), columns), shard.column, first)


def _hub_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """Rows of a data set that `datasets` reads."""
    rows, first = load_dataset(str(path), shard.subset, shard.split, streaming=shard.kind == "stream"), 0
    if shard.kind == "rows":
        rows, first = rows.select(range(shard.start, shard.stop)), shard.start
    elif shard.stop > 1:
        rows = rows.shard(num_shards=shard.stop, index=shard.start)
    yield from _arrow_rows(rows.with_format("arrow").iter(256), shard.column, first)


def _arrow_rows(batches: Iterable[Any], column: str, first: int) -> Iterator[Row]:
    """The rows of Arrow tables, of which the first has the number `first`: of one without the column, all columns."""
    number = first
    for batch in batches:
        for value in batch.column(column) if column in batch.schema.names else batch.to_pylist():
            try:
                yield number, value if isinstance(value, dict) else {column: value.as_py()}
            except UnicodeDecodeError as error:
                raise ValueError(f"row {number:,}: {error}") from error
            number += 1
