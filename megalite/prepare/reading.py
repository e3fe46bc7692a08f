"""Reads the documents of one shard of the input.

A document comes as one or more pieces, so that a text of any size passes through bounded memory. The pieces joined are
the document, exactly: text is not stripped, and line ends are not translated. Empty and missing texts are skipped and
counted.

Local files are read here and data sets of the hub by `datasets`, because it is much slower on files: its streaming
reader took 2 to 5 s for 40 MB of jsonl, jsonl.gz, csv or parquet, and 1 to 2 s to be imported in each process, where
these readers take 0.4 to 0.6 s. One large jsonl file is work for several processes here, for one there.
"""

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from megalite.config.user_files import refusing
from megalite.errors.problems import Problem, UserError
from megalite.prepare.finding import PACKED

PIECE = 1 << 20  # characters after which a document is cut at the next safe place
READ = 1 << 20  # bytes read at once


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
    stop: int = 0
    size: int = 0
    column: str = "text"
    subset: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Piece:
    """Part of a document; `text` None is a row without text."""

    text: str | None
    ends_document: bool = True


def pieces(shard: Shard) -> Iterator[Piece]:
    """The documents of a shard in order, in pieces."""
    if shard.kind == "text":
        for path in shard.paths:
            yield from _text_pieces(Path(path))
        return
    for text in _rows(shard):
        if not text or len(text) <= PIECE:
            yield Piece(text or None)
        else:
            *head, tail = cut(text)
            yield from (Piece(part, ends_document=False) for part in head)
            yield Piece(tail)


def documents(shard: Shard) -> Iterator[str]:
    """The documents of a shard in order, each whole."""
    parts: list[str] = []
    for piece in pieces(shard):
        parts.append(piece.text or "")
        if piece.ends_document:
            if any(parts):
                yield "".join(parts)
            parts = []


def safe_cut(text: str, start: int) -> int:
    """A place at or after `start` where the text can be cut without changing its tokens, or 0.

    It is in front of a line end that follows a letter or digit: there the byte-level BPEs of GPT-2, Llama 3 and Qwen
    begin a new word. Tokenizers that see the whole text at once (SentencePiece's) may differ around a cut.
    """
    while (at := text.find("\n", start)) != -1:
        at -= text[at - 1 : at] == "\r"
        if at and text[at - 1].isalnum():
            return at
        start = at + 2
    return 0


def cut(text: str) -> list[str]:
    """`text` in pieces of about PIECE characters."""
    parts, start = [], 0
    while len(text) - start > PIECE and (stop := safe_cut(text, start + PIECE)):
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked; whatever goes wrong while they are read is a refusal."""
    with refusing(path, "check its permissions, repair it, or copy it again"):
        if codec := PACKED.get(path.suffix.lower()):
            import pyarrow

            with io.BufferedReader(pyarrow.input_stream(str(path), compression=codec)) as file:
                yield file
        else:
            with path.open("rb") as file:
                yield file


def _text_pieces(path: Path) -> Iterator[Piece]:
    """One file as one document."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    buffer, offset, block = "", 0, b"\n"
    with opened(path) as file:
        while block:
            block = file.read(READ)
            if (at := block.find(0)) != -1:
                raise binary_file(str(path), offset + at, "a zero byte")
            pending = len(decoder.getstate()[0])  # bytes of a character that the block before began
            try:
                buffer += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise binary_file(str(path), offset - pending + error.start, "an invalid byte") from error
            offset += len(block)
            if len(buffer) > PIECE and (stop := safe_cut(buffer, PIECE)):
                yield Piece(buffer[:stop], ends_document=False)
                buffer = buffer[stop:]
    yield Piece(buffer or None)


def binary_file(where: str, offset: int, found: str) -> UserError:
    """What is no text, by its file (and line)."""
    rule = f"is not UTF-8 text: {found} at byte offset {offset:,}"
    return UserError(Problem("data.path", where, rule, "give text in UTF-8 (convert it with iconv), jsonl or parquet"))


def _rows(shard: Shard) -> Iterator[str | None]:
    readers = {"jsonl": _jsonl_rows, "json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    return readers.get(shard.kind, _hub_rows)(Path(shard.paths[0]), shard)


def _jsonl_rows(path: Path, shard: Shard) -> Iterator[str | None]:
    """The text of each line that starts in [start, stop)."""
    with opened(path) as file:
        at = 0
        if shard.start:
            at = file.seek(shard.start - 1)
            at += len(file.readline())  # the line that began in the shard before
        while at < shard.stop and (line := file.readline()):
            if line.strip():
                yield _line_text(path, line, at, shard.column)
            at += len(line)


def _line_text(path: Path, line: bytes, at: int, column: str) -> str | None:
    """The text in one line of a jsonl file; `at` is the line's byte offset."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise binary_file(f"{path}:{_line_number(path, at)}", at + error.start, "an invalid byte") from error
    except (ValueError, RecursionError) as error:
        place = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        place = f"{error.msg} at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else place
        shown = line[:80].decode("utf-8", "backslashreplace").rstrip()
        rule = f"is not a line of JSON ({place}): {shown!r}"
        where = f"{path}:{_line_number(path, at)}"
        raise UserError(Problem("data.path", where, rule, "one JSON object per line, in UTF-8")) from error
    return _row_text(row, column, lambda: f"{path}:{_line_number(path, at)}")


def is_json_lines(path: Path) -> bool:
    """Whether a .json file holds one object a line (the first is whole), not one value over all of its lines."""
    with opened(path) as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _json_rows(path: Path, shard: Shard) -> Iterator[str | None]:
    """The text of each object in a list, or of the one object that the file is."""
    with opened(path) as file:
        found = json.load(file)
    for number, row in enumerate(found if isinstance(found, list) else [found]):
        yield _row_text(row, shard.column, lambda number=number: f"{path}, row {number:,}")  # type: ignore[misc]


def _row_text(row: Any, column: str, where: Callable[[], str]) -> str | None:
    """The text of one JSON object."""
    if not isinstance(row, dict):
        rule = f"holds {type(row).__name__}, not an object"
        raise UserError(Problem("data.path", where(), rule, 'write {"text": "..."}'))
    if column not in row:
        raise missing_column(where(), column, list(row))
    text = row[column]
    if text is not None and not isinstance(text, str):  # where() may be slow
        raise wrong_type(column, type(text).__name__, where())
    return without_lone_surrogates(text) if text else text


def _csv_rows(path: Path, shard: Shard) -> Iterator[str | None]:
    """The text of each row; a quoted one may go over several lines."""
    csv.field_size_limit(sys.maxsize)  # the module's own is 128 KiB
    with opened(path) as file:
        rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
        try:
            if shard.column not in (names := list(rows.fieldnames or ())):
                raise missing_column(str(path), shard.column, names)
            for row in rows:
                yield row[shard.column]
        except (UnicodeDecodeError, csv.Error) as error:
            rule = f"is not csv in UTF-8: {error} (after line {rows.line_num:,})"
            raise UserError(Problem("data.path", str(path), rule, "repair it, or convert it to jsonl")) from error


def without_lone_surrogates(text: str) -> str:
    """JSON can spell half of a character (`\\ud83d` alone), which no encoding of text can hold: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def checked_text(value: Any, column: str, where: str) -> str | None:
    """`value` if it is a text or missing."""
    if value is not None and not isinstance(value, str):
        raise wrong_type(column, type(value).__name__, where)
    return value


def wrong_type(column: str, found: str, where: str) -> UserError:
    rule = f"column {column!r} holds {found}, not text ({where})"
    return UserError(Problem("data.text_column", column, rule, "name the column that holds the text"))


def missing_column(where: str, column: str, found: list[str]) -> UserError:
    rule = f"{where} has no such column; it has: {', '.join(map(str, found)) or 'none'}"
    remedy = (
        f"data.text_column={found[0]}" if len(found) == 1 else "set data.text_column to the one that holds the text"
    )
    return UserError(Problem("data.text_column", column, rule, remedy))


def _line_number(path: Path, at: int) -> int:
    """Which line starts at byte `at`; counted only to report a mistake."""
    number = 1
    with opened(path) as file:
        while at > 0 and (block := file.read(min(READ, at))):
            number += block.count(b"\n")
            at -= len(block)
    return number


def _parquet_rows(path: Path, shard: Shard) -> Iterator[str | None]:
    """The text column of the row groups [start, stop)."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            first = row = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
            groups = list(range(shard.start, shard.stop))
            batches = file.iter_batches(batch_size=256, row_groups=groups, columns=[shard.column])
            for row, value in enumerate(chain.from_iterable(batch.column(0) for batch in batches), first):
                yield checked_text(value.as_py(), shard.column, f"row {row:,} of {path}")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text: row {row:,} of column {shard.column!r} ({error})"
        raise UserError(Problem("data.path", str(path), rule, "leave out that row, or repair it")) from error
    except (pyarrow.ArrowException, OSError) as error:
        rule = f"is damaged in row groups {shard.start} to {shard.stop - 1} ({str(error).splitlines()[0]})"
        raise UserError(Problem("data.path", str(path), rule, "copy it again")) from error


def _hub_rows(path: Path, shard: Shard) -> Iterator[str | None]:
    """The text column of some rows of a data set that `datasets` reads."""
    from megalite.prepare.hub import load_dataset

    rows = load_dataset(str(path), shard.subset, shard.split, streaming=shard.kind == "stream")
    if shard.kind == "stream":
        chosen = rows.shard(num_shards=shard.stop, index=shard.start) if shard.stop > 1 else rows
    else:
        chosen = rows.select(range(shard.start, shard.stop))
    for batch in chosen.with_format("arrow").iter(256):
        if shard.column not in batch.column_names:
            raise missing_column(str(path), shard.column, batch.column_names)
        for value in batch.column(shard.column).to_pylist():
            yield checked_text(value, shard.column, str(path))
