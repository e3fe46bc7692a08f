"""Where documents come from: what a source's name covers, and how it is divided into shards.

`identity` costs no more than looking at file names, sizes and times, and names the prepared tokens; `plan` opens the
files, finds whatever can be wrong without reading them whole, and divides them. Both are the same on every call and in
every process, for the same files.
"""

import glob
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.problems import Problem, UserError
from megalite.config.schema import DataConfig
from megalite.data import reading
from megalite.data.cache import digest
from megalite.data.reading import Shard

NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}
IN_FOLDERS = (".txt", ".jsonl", ".parquet")  # what is taken from a folder
JSON_LINES = (".jsonl", ".json", ".ndjson")
COMPRESSED = {".gz": "gunzip", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}
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
            return sorted(path for path in Path(self.paths[0]).rglob("*") if path.is_file())
        return collected(lambda path: _files_at(path), self.paths)

    def plan(self) -> list[Shard]:
        """The shards, in order; all problems that show without reading everything, at once."""
        if self.kind == "hf":
            return _hub_shards(self)
        if self.kind == "stdlib":
            return _text_shards([(path, path.stat().st_size) for path in self.files()])
        return _file_shards(self.files(), self.column)


def sources_of(data: DataConfig) -> list[Source]:
    """The parts of the data that must be tokenized, one per entry of data.path."""
    if data.source == "stdlib":
        return [Source("stdlib")]
    return [
        Source(data.source, (path,), data.text_column, data.subset, data.split, data.streaming)
        for path in paths_of(data)
    ]


def paths_of(data: DataConfig) -> list[str]:
    """data.path as a list."""
    paths = [data.path] if isinstance(data.path, str) else list(data.path or [])
    if not paths or not all(isinstance(path, str) and path for path in paths):
        rule = f"data={data.source} needs a path, or a list of paths"
        example = {"text": "my.txt", "hf": "org/name", "tokens": "folder/prefix"}.get(data.source, "PATH")
        raise UserError(Problem("data.path", data.path, rule, f"data.path={example}"))
    return paths


def collected(function: Callable[[Any], list[Any]], items: Any) -> list[Any]:
    """The results of all calls in one list; the problems of all calls in one error."""
    results: list[Any] = []
    problems: list[Problem] = []
    for item in items:
        try:
            results.extend(function(item))
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(problems)
    return results


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


def _files_at(path: str) -> list[Path]:
    """The files that one entry of data.path means."""
    place = Path(path).expanduser().absolute()
    if place.is_dir():
        found = sorted(file for file in place.rglob("*") if file.suffix in IN_FOLDERS and file.is_file())
        if not found:
            others = sorted({file.suffix or file.name for file in place.iterdir()})[:8]
            rule = f"the folder holds no {', '.join(IN_FOLDERS)} file; it holds: {', '.join(others) or 'nothing'}"
            raise UserError(Problem("data.path", path, rule, "give the files themselves, or a glob"))
        return found
    if glob.has_magic(path) and not place.exists():
        matches = [Path(match).absolute() for match in glob.glob(str(Path(path).expanduser()), recursive=True)]
        found = sorted(match for match in matches if match.is_file())
        if not found:
            rule = "the glob matches no file"
            raise UserError(Problem("data.path", path, rule, "check it with ls, and quote it in the shell"))
        return found
    if not place.exists():
        rule = f"there is no such file or folder (looked in {place.parent})"
        raise UserError(
            Problem("data.path", path, rule, "give a txt, jsonl or parquet file, a folder of them or a glob")
        )
    if not place.is_file():
        rule = "is no regular file: it is read several times, so a pipe or a device will not do"
        raise UserError(Problem("data.path", path, rule, "write its text to a file first"))
    return [place]


def _file_shards(files: list[Path], column: str) -> list[Shard]:
    """Shards of text, jsonl and parquet files, in the files' order."""
    kinds = {path: _kind(path) for path in files}
    sizes = dict(zip(files, collected(lambda path: [_checked_size(path, kinds[path], column)], files), strict=True))
    size = shard_size(sum(sizes.values()))
    runs: list[tuple[str, list[Path]]] = []  # neighbouring text files share shards
    for path in files:
        kind = kinds[path]
        if kind == "text" and runs and runs[-1][0] == "text":
            runs[-1][1].append(path)
        else:
            runs.append((kind, [path]))

    def shards_of(run: tuple[str, list[Path]]) -> list[Shard]:
        kind, members = run
        if kind == "parquet":
            return _parquet_shards(members[0], column, size)
        if kind == "jsonl":
            end = sizes[members[0]]
            return [
                Shard("jsonl", (str(members[0]),), start, min(start + size, end), min(size, end - start), column)
                for start in range(0, end, size)
            ]
        return _text_shards([(path, sizes[path]) for path in members], size)

    return collected(shards_of, runs)


def shard_size(total: int) -> int:
    """Bytes per shard: many enough to share work and lose little to a kill, few enough to be cheap."""
    return min(max(total // SHARDS, SMALLEST), LARGEST)


def _kind(path: Path) -> str:
    return "parquet" if path.suffix == ".parquet" else "jsonl" if path.suffix in JSON_LINES else "text"


def _checked_size(path: Path, kind: str, column: str) -> int:
    """Size of a file that can be opened, holds something, and begins as its kind does."""
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        rule = f"cannot be read ({error.strerror or error})"
        raise UserError(Problem("data.path", str(path), rule, "check the path and its permissions")) from error
    if size == 0:
        raise UserError(Problem("data.path", str(path), "is empty (0 bytes)", "remove it from data.path, or fill it"))
    if unpack := COMPRESSED.get(path.suffix):
        raise UserError(Problem("data.path", str(path), "is compressed", f"unpack it first: {unpack} {path.name}"))
    if kind == "jsonl":
        _check_first_line(path, column)
    elif kind == "text":  # refuse a binary file before any work; what lies deeper is found when it is read
        next(reading.pieces(Shard("text", (str(path),))))
    return size


def _check_first_line(path: Path, column: str) -> None:
    with path.open("rb") as file:
        at = 0
        for line in file:
            if line.strip():
                reading.json_text(path, line, at, column)
                return
            at += len(line)


def _text_shards(files: list[tuple[Path, int]], size: int | None = None) -> list[Shard]:
    """Whole files, gathered into shards of about `size` bytes."""
    size = size or shard_size(sum(length for _, length in files))
    shards: list[Shard] = []
    gathered: list[str] = []
    held = 0
    for number, (path, length) in enumerate(files, 1):
        gathered.append(str(path))
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
    from megalite.data.hub import load_dataset

    name = source.paths[0]
    rows = load_dataset(name, source.subset, source.split, source.streaming)
    columns = rows.column_names
    if columns and source.column not in columns:
        raise reading.missing_column(name, source.column, columns)
    common: dict[str, Any] = {"column": source.column, "subset": source.subset, "split": source.split}
    if source.streaming:
        count = rows.num_shards
        return [Shard("stream", (name,), number, count, **common) for number in range(count)]
    total = rows.dataset_size or len(rows) * HUB_ROW
    step = max(1, len(rows) * shard_size(total) // max(1, total))
    return list(_row_shards(name, len(rows), step, total, common))


def _row_shards(name: str, rows: int, step: int, total: int, common: dict[str, Any]) -> Iterator[Shard]:
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Shard("rows", (name,), start, stop, total * (stop - start) // rows, **common)
