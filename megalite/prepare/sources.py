"""Finds the documents that a source's name covers, and divides them into shards.

`identity` looks at file names, sizes and times alone, and names the prepared tokens. `plan` opens the files, refuses
what can be seen to be wrong without reading them whole, and divides them. For the same files, both are the same on
every call and in every process.
"""

import os
import sys
import sysconfig
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from megalite.config.schema import DataConfig
from megalite.config.user_files import refusing
from megalite.data.open import digest, paths_of
from megalite.errors.problems import Problem, UserError, collect_all
from megalite.prepare import reading
from megalite.prepare.finding import CHECK, PACKED, counted, files_at, kind_of, walk
from megalite.prepare.reading import Shard

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
UNPACK = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}  # what must be unpacked first, and by what
UNPACKED = 4  # bytes of text in a byte of a packed file, about
SHARDS = 1024  # about this many for large inputs ...
SMALLEST, LARGEST = 1 << 20, 256 << 20  # ... of between so many and so many bytes
HUB_ROW = 2048  # bytes that a row of a hub data set is taken for where its size is unknown


@dataclass(frozen=True)
class Source:
    """One part of the data. `paths`: text: files, folders and globs; hf: one data set's name; stdlib: nothing."""

    kind: str
    paths: tuple[str, ...] = ()
    column: str = "text"
    subset: str | None = None
    split: str = "train"
    streaming: bool = False

    @property
    def label(self) -> str:
        """What to call it in a file name."""
        if self.kind == "stdlib":
            return f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
        name = Path(self.paths[0].rstrip("/")).name.replace("*", "") or "text"
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:40]

    def identity(self) -> str:
        """A hash that changes when the documents do."""
        if self.kind == "hf" and not Path(self.paths[0]).exists():
            return digest(self.kind, self.paths, self.column, self.subset, self.split)
        files = []
        for path in self.files():
            state = path.stat()
            files.append((str(path), state.st_size, state.st_mtime_ns))
        return digest(self.kind, self.column, self.subset, self.split, files)

    def files(self) -> list[Path]:
        """All local files, in the order of their documents."""
        if self.kind == "stdlib":
            return library_files()
        if self.kind == "hf":
            place = Path(self.paths[0])
            return sorted(walk(place)) if place.is_dir() else [place]
        return [file for found in collect_all(files_at, self.paths) for file in found.files]

    def plan(self) -> list[Shard]:
        """The shards, in order; all problems that show without reading everything, at once."""
        if self.kind == "hf":
            return _hub_shards(self)
        if self.kind == "stdlib":
            files = [(str(path), path.stat().st_size) for path in self.files()]
            return _text_shards(files, shard_size(sum(size for _, size in files)))
        return _file_shards(self.files(), self.column)


def sources_of(data: DataConfig) -> list[Source]:
    """The parts of the data that must be tokenized, one per entry of data.path."""
    if data.source == "stdlib":
        return [Source("stdlib")]
    return [
        Source(data.source, (path,), data.text_column, data.subset, data.split, data.streaming)
        for path in paths_of(data)
    ]


def not_read(sources: list[Source]) -> list[str]:
    """What lies beside the files that are read, in words: a line for each entry of data.path that has any."""
    paths = [path for source in sources if source.kind == "text" for path in source.paths]
    ignored = [(path, files_at(path).ignored) for path in paths]
    return [f"not read in {path}: {counted(names)}" for path, names in ignored if names]


def library_files() -> list[Path]:
    """The running Python's own modules, without tests and without what pip installed."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, names, members in os.walk(root):
        names[:] = [name for name in names if name not in NOT_LIBRARY]
        files.extend(Path(folder, member) for member in members if member.endswith(".py"))
    if not files:
        rule = f"this Python has no source text of its library in {root}"
        raise UserError(Problem("data", "stdlib", rule, "use a Python with its .py files, or data=text data.path=FILE"))
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _file_shards(files: list[Path], column: str) -> list[Shard]:
    """Shards of files, in the files' order."""
    examined = collect_all(lambda path: _examined(path, column), files)
    size = shard_size(sum(shard.size for shard in examined))
    shards: list[Shard] = []
    for is_text, run in groupby(examined, lambda shard: shard.kind == "text"):  # neighbouring texts share shards
        if is_text:
            shards += _text_shards([(shard.paths[0], shard.size) for shard in run], size)
        else:
            shards += chain.from_iterable(collect_all(lambda shard: _cut(shard, size), run))
    return shards


def _cut(shard: Shard, size: int) -> list[Shard]:
    """A file as shards of about `size` bytes, where it can be read from the middle."""
    if shard.kind == "parquet":
        return _parquet_shards(Path(shard.paths[0]), shard.column, size)
    if shard.kind != "jsonl" or Path(shard.paths[0]).suffix.lower() in PACKED:
        return [shard]
    starts = range(0, shard.size, size)
    stops = [*starts[1:], shard.size]
    return [replace(shard, start=at, stop=stop, size=stop - at) for at, stop in zip(starts, stops, strict=True)]


def shard_size(total: int) -> int:
    """Bytes per shard: many enough to share work and lose little to a kill, few enough to be cheap."""
    return min(max(total // SHARDS, SMALLEST), LARGEST)


def _examined(path: Path, column: str) -> Shard:
    """A file as one shard: it can be opened, holds something, and begins as its kind does."""
    with refusing(path, CHECK):
        size = path.stat().st_size
    if size == 0:
        raise UserError(Problem("data.path", str(path), "is empty (0 bytes)", "remove it from data.path, or fill it"))
    suffix = path.suffix.lower()
    if unpack := UNPACK.get(suffix):
        raise UserError(Problem("data.path", str(path), "is compressed", f"unpack it first: {unpack} {path.name}"))
    kind = kind_of(path) or "text"
    if kind == "json" and reading.is_json_lines(path):
        kind = "jsonl"
    size *= UNPACKED if suffix in PACKED else 1
    shard = Shard(kind, (str(path),), stop=sys.maxsize, size=size, column=column)
    if kind != "parquet":  # refuse another kind, or a wrong column, before any work
        next(reading.pieces(shard), None)
    return shard


def _text_shards(files: list[tuple[str, int]], size: int) -> list[Shard]:
    """Whole files (path, bytes), gathered into shards of about `size` bytes."""
    shards: list[Shard] = []
    gathered: list[str] = []
    held = 0
    for number, (path, length) in enumerate(files, 1):
        gathered.append(path)
        held += length
        if held >= size or number == len(files):
            shards.append(Shard("text", tuple(gathered), size=held))
            gathered, held = [], 0
    return shards


def _parquet_shards(path: Path, column: str, size: int) -> list[Shard]:
    """Neighbouring row groups, gathered into shards of about `size` bytes of text."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        rule = f"is not a whole parquet file ({str(error).splitlines()[0]}; {path.stat().st_size:,} bytes)"
        raise UserError(Problem("data.path", str(path), rule, "copy it again: it is truncated or damaged")) from error
    names = schema.names
    if column not in names:
        raise reading.missing_column(str(path), column, names)
    at = names.index(column)
    if not _is_text(schema.types[at]):
        raise reading.wrong_type(column, str(schema.types[at]), str(path))
    shards: list[Shard] = []
    start = held = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        flat = row_group.num_columns == len(names)  # nested columns shift the numbering
        held += row_group.column(at).total_uncompressed_size if flat else row_group.total_byte_size
        if held >= size or group + 1 == metadata.num_row_groups:
            shards.append(Shard("parquet", (str(path),), start, group + 1, held, column))
            start, held = group + 1, 0
    return shards


def _is_text(kind: Any) -> bool:
    """Whether a column of this pyarrow type holds texts (or nothing at all)."""
    from pyarrow import types

    held = kind.value_type if types.is_dictionary(kind) else kind
    return any(is_a(held) for is_a in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))


def _hub_shards(source: Source) -> list[Shard]:
    from megalite.prepare.hub import load_dataset

    name = source.paths[0]
    rows = load_dataset(name, source.subset, source.split, source.streaming)
    columns = rows.column_names
    if columns and source.column not in columns:
        raise reading.missing_column(name, source.column, columns)
    common: dict[str, Any] = {"column": source.column, "subset": source.subset, "split": source.split}
    if source.streaming:
        count = rows.num_shards
        return [Shard("stream", (name,), number, count, **common) for number in range(count)]
    total, count = rows.dataset_size or len(rows) * HUB_ROW, len(rows)
    step = max(1, count * shard_size(total) // max(1, total))
    cuts = [(start, min(start + step, count)) for start in range(0, count, step)]
    return [Shard("rows", (name,), start, stop, total * (stop - start) // count, **common) for start, stop in cuts]
