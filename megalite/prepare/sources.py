"""Finds the documents that a source's name covers, divides them into shards, and reads them in pieces.

A folder stands for every text file in it and below, in the order of their paths; links are followed, and each folder is
read once. The pieces joined are the document, exactly: text is not stripped, and line ends are not translated. Nothing
is dropped: a folder that cannot be read is refused, and a mistake with file and row.

`datasets` reads data sets of the hub alone: local files take it several times as long, its import takes 1 to 2 s in
each process, and one large jsonl file is work for one process there.
"""

import csv
import glob
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from megalite.config.files import refusing
from megalite.config.schema import DataConfig
from megalite.data.open import digest, paths_of
from megalite.errors.problems import NO_VALUE, Problem, UserError, about, collect_all
from megalite.prepare.cuts import Cut, Piece, behind_a_word, in_pieces
from megalite.prepare.hub import load_dataset

KINDS = {".txt": "text", ".csv": "csv", ".parquet": "parquet"}
KINDS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl")
PACKED = {".gz": "gzip", ".zst": "zstd"}  # may follow any of these; parquet packs itself
READ = 1 << 20  # bytes or characters read at once
REPAIR = "copy it again, or give UTF-8 text in the column data.text_column; data=hf reads JSON that is not lines"
NOT_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo")
UNPACKED = 4  # bytes of text in a byte of a packed file, about
SHARDS = 1024  # about this many for large inputs ...
SMALLEST, LARGEST = 1 << 20, 256 << 20  # ... of between so many and so many bytes
HUB_ROW = 2048  # bytes that a row of a hub data set is taken for where its size is unknown

Row = tuple[int, Any]  # its place (a line's first byte, or the row's number), and a line of JSON or the column's value


@dataclass(frozen=True)
class Shard:
    """A part of the input that one worker tokenizes: one file or data set, or several files of text, a document each.

    The unit of `start` and `stop` depends on the kind. text, csv and packed jsonl: files, always 0 to 1; jsonl: bytes,
    and a line belongs to the shard in which it starts; parquet: row groups; rows: rows of a hub data set on disk;
    stream: shards of a streamed one. `size`: bytes of text, as near as is known before reading.
    """

    kind: str
    paths: tuple[str, ...]
    start: int = 0
    stop: int = 1
    size: int = 0
    column: str = "text"
    subset: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Source:
    """One part of the data. `paths`: text: files, folders and globs; hf: one data set's name; stdlib: nothing."""

    kind: str
    paths: tuple[str, ...] = ()
    column: str = "text"
    subset: str | None = None
    split: str = "train"
    streaming: bool = False
    setting: str = field(default="data.path", compare=False)  # that names it

    @property
    def label(self) -> str:
        """The part of a file name that people know the source by."""
        if self.kind == "stdlib":
            return f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
        name = Path(self.paths[0].rstrip("/")).name.replace("*", "") or "text"
        return re.sub(r"[^\w.-]", "-", name)[:40]

    @cached_property
    def files(self) -> list[Path]:
        """The local files in the order of their documents."""
        if self.kind == "stdlib":  # without tests, and without what pip installed
            return [file for file in _walk(sysconfig.get_path("stdlib"), but=NOT_LIBRARY) if file.suffix == ".py"]
        if self.kind == "hf":
            return _walk(self.paths[0])
        return [file for files in collect_all(_files_at, self.paths) for file in files]

    def identity(self) -> str:
        """A hash that changes when the documents do."""
        return about(self.setting, self._identity)

    def _identity(self) -> str:
        if self.kind == "hf" and not os.path.exists(self.paths[0]):
            return digest(self.kind, self.paths, self.column, self.subset, self.split)
        states = [(str(path), path.stat()) for path in self.files]
        files = [(path, state.st_size, state.st_mtime_ns) for path, state in states]
        return digest(self.kind, self.column, self.subset, self.split, files)

    def plan(self) -> list[Shard]:
        """The shards, in order; all problems that show without reading everything, at once."""
        return about(self.setting, self._plan)

    def _plan(self) -> list[Shard]:
        whole = [self._data_set()] if self.kind == "hf" else collect_all(self._file, self.files)
        # Enough shards to share work and lose little to a kill, few enough to be cheap.
        size = min(max(sum(shard.size for shard in whole) // SHARDS, SMALLEST), LARGEST)
        shards: list[Shard] = []
        for shard in whole:
            last = shards[-1] if shards else None
            if shard.kind == "text" and last and last.kind == "text" and last.size < size:  # texts share shards
                shards[-1] = replace(last, paths=last.paths + shard.paths, size=last.size + shard.size)
                continue
            units = shard.stop
            step = max(1, units * size // shard.size) if shard.size else 1
            cuts = pairwise([*range(0, units, step), units])
            shards += [replace(shard, start=at, stop=to, size=shard.size * (to - at) // units) for at, to in cuts]
        return shards

    def _data_set(self) -> Shard:
        """A data set that `datasets` reads as one shard, of rows on disk or of the shards of a stream."""
        rows = load_dataset(self.paths[0], self.subset, self.split, self.streaming)
        size = 0 if self.streaming else rows.dataset_size or len(rows) * HUB_ROW
        kind, units = ("stream", rows.num_shards) if self.streaming else ("rows", len(rows))
        shard = Shard(kind, self.paths, 0, units, size, self.column, self.subset, self.split)
        next(pieces(replace(shard, stop=min(1, units))), None)  # refuse a wrong column before any work
        return shard

    def _file(self, path: Path) -> Shard:
        """A file as one shard: it can be opened, has content, and begins as its kind does."""
        kind = _kind_of(path) or "text"
        with refusing(path, REPAIR):
            size, stop, packed = path.stat().st_size, 1, path.suffix.lower() in PACKED
            if size == 0 and self.kind != "stdlib":
                raise ValueError("is empty (0 bytes): remove it from data.path, or fill it")
            if kind == "parquet":
                from pyarrow import parquet

                stop = int(parquet.read_metadata(path).num_row_groups)
            elif kind == "jsonl" and not packed:
                stop = size
            shard = Shard(kind, (str(path),), 0, stop, size * (UNPACKED if packed else 1), self.column)
        if self.kind != "stdlib":  # refuse another kind, or a wrong column, before any work
            next(pieces(shard), None)
        return shard


def sources_of(data: DataConfig, setting: str = "data.path") -> list[Source]:
    """The parts of the data that must be tokenized, one per entry of data.path, which the user knows as `setting`."""
    if data.source == "stdlib":
        return [Source("stdlib")]
    choice = data.text_column, data.subset, data.split, data.streaming
    return [Source(data.source, (path,), *choice, setting) for path in paths_of(data)]


def _kind_of(path: Path) -> str | None:
    """The kind of content that a file's name says; None if it does not say."""
    name = path.with_suffix("") if path.suffix.lower() in PACKED else path
    return KINDS.get(name.suffix.lower())


def _files_at(path: str) -> list[Path]:
    """The files that one entry of data.path means, in order."""
    place = Path(path).expanduser().absolute()
    with refusing(place, REPAIR):
        files = [place]
        if place.is_dir():
            files = [file for file in _walk(path) if _kind_of(file)]
        elif glob.has_magic(path) and not place.exists():
            matches = map(Path, glob.glob(str(Path(path).expanduser()), recursive=True))
            files = sorted({match.absolute() for match in matches if not match.is_dir()})
        missing = [file for file in files if not file.is_file()] if files else [place]
        if missing:
            rule = f"there is no such file, and no folder or glob of {', '.join(KINDS)} files"
            hint = "give the files themselves, a folder of them or a quoted glob"
            raise UserError(Problem("data.path", str(missing[0]), rule, hint))
    return files


def _walk(folder: str, but: Iterable[str] = ()) -> list[Path]:
    """All files in a folder and below, sorted, but in folders of some names; each folder once, links followed."""

    def fail(error: OSError) -> None:
        raise UserError(Problem("data.path", error.filename, f"cannot be looked into ({error.strerror})", "chmod u+rx"))

    found, seen = list[Path](), set[str]()
    for place, names, members in os.walk(Path(folder).expanduser().absolute(), onerror=fail, followlinks=True):
        real = os.path.realpath(place)
        names[:] = sorted({*names} - {*but}) if real not in seen else []
        found += [Path(place, member) for member in members if real not in seen]
        seen.add(real)
    return sorted(found)


def pieces(shard: Shard, cut: Cut = behind_a_word) -> Iterator[Piece]:
    """The documents of a shard in order, in pieces that `cut` allows; UserError with file and row where one cannot be
    read."""
    if shard.kind == "text":
        for number, name in enumerate(shard.paths):
            with refusing(name, REPAIR):
                yield from in_pieces(_text_blocks(Path(name)), cut, number)
        return
    readers = {"jsonl": _jsonl_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    path = Path(shard.paths[0])
    with refusing(path, REPAIR):
        for number, (place, value) in enumerate(readers.get(shard.kind, _hub_rows)(path, shard)):
            try:
                text = _text_of(value, shard)
            except (ValueError, RecursionError) as error:
                where = f"line {_line_number(path, place):,}" if shard.kind == "jsonl" else f"row {place:,}"
                raise UserError(Problem(str(path), NO_VALUE, f"{where}: {error}", REPAIR, here=True)) from error
            yield from in_pieces([text], cut, number)


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked."""
    if codec := PACKED.get(path.suffix.lower()):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression=codec))
    return path.open("rb")


def _text_of(value: Any, shard: Shard) -> str:
    """The text that a row has in the column, empty without one; `value` is a line of JSON or what the column holds."""
    column = shard.column
    if shard.kind == "jsonl":
        row = json.loads(value)
        if not isinstance(row, dict):
            raise ValueError(f"holds {type(row).__name__}, not an object like {{{column!r}: '...'}}")
        _check_column([*row], column)
        value = row[column]
    text = "" if value is None else value
    if not isinstance(text, str):
        raise ValueError(f"column {column!r} holds {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a character (`\ud83d` alone): it becomes U+FFFD
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _check_column(names: Sequence[str], column: str) -> None:
    if names.count(column) != 1:
        columns = ", ".join(map(str, names))
        raise ValueError(f"there must be one column {column!r} (data.text_column); it has: {columns}")


def _line_number(path: Path, at: int) -> int:
    """The number of the line that starts at byte `at`; counted only to report a mistake."""
    with opened(path) as file:
        blocks = (file.read(min(READ, at - start)) for start in range(0, at, READ))
        return 1 + sum(block.count(b"\n") for block in blocks)


def _text_blocks(path: Path) -> Iterator[str]:
    """The text of a file, which is one document."""
    with io.TextIOWrapper(opened(path), encoding="utf-8", newline="") as file:
        try:
            while block := file.read(READ):
                if "\0" in block:
                    raise ValueError("is not UTF-8 text: it holds a zero byte")
                yield block
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 text: {error.reason}") from error


def _jsonl_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """Each line that starts in [start, stop)."""
    with opened(path) as file:
        at = 0
        if shard.start:
            at = file.seek(shard.start - 1)
            at += len(file.readline())  # the line that began in the shard before
        packed = path.suffix.lower() in PACKED  # read whole
        while (packed or at < shard.stop) and (line := file.readline()):
            if line.strip():
                yield at, line
            at += len(line)


def _csv_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """Each row; a quoted text may go over several lines. ValueError where a row has fields that the header does not
    name, or ends before the column: the text was split at a comma or a line end that no quotes guard."""
    csv.field_size_limit(sys.maxsize)  # the module's own is 128 KiB
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        rows, number = csv.DictReader(file, strict=True), -1
        try:
            _check_column(rows.fieldnames or [], shard.column)
            for number, row in enumerate(rows):
                if None in row or row[shard.column] is None:
                    rule = "has more or fewer fields than the header: text with a comma or a line end needs quotes"
                    raise ValueError(f"row {number:,} {rule}")
                yield number, row[shard.column]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"row {number + 1:,} is not csv in UTF-8: {error}") from error


def _parquet_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """The rows of the row groups [start, stop)."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        _check_column(file.schema_arrow.names, shard.column)
        first = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
        batches = file.iter_batches(256, range(shard.start, shard.stop), [shard.column])
        yield from _arrow_rows(batches, shard.column, first)


def _hub_rows(path: Path, shard: Shard) -> Iterator[Row]:
    """The rows of a data set that `datasets` reads."""
    rows, first = load_dataset(str(path), shard.subset, shard.split, streaming=shard.kind == "stream"), 0
    if shard.kind == "rows":
        rows, first = rows.select(range(shard.start, shard.stop)), shard.start
    else:
        rows = rows.shard(num_shards=rows.num_shards, index=shard.start)
    for table in rows.with_format("arrow").iter(256):
        if rows.info.builder_name == "csv" and "__index_level_0__" in table.schema.names:  # pandas', without a header
            raise ValueError("the rows of a csv file have more fields than its header")
        yield from _arrow_rows([table], shard.column, first)
        first += len(table)


def _arrow_rows(tables: Iterable[Any], column: str, first: int) -> Iterator[Row]:
    """The rows of Arrow tables, numbered from `first` on."""
    for table in tables:
        _check_column(table.schema.names, column)
        yield from enumerate(table.column(column).to_pylist(), first)
        first += len(table)
