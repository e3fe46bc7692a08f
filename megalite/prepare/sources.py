"""Finds the documents that a source's name covers, and divides them into shards.

`identity` looks at file names, sizes and times alone, and names the prepared tokens. `plan` opens the files, refuses
what can be seen to be wrong without reading them whole, and divides them. For the same files, both are the same on
every call and in every process.
"""

import os
import sys
import sysconfig
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megalite.config.schema import DataConfig
from megalite.config.user_files import refusing
from megalite.data.open import digest, paths_of
from megalite.errors.problems import collect_all
from megalite.prepare.finding import CHECK, PACKED, counted, files_at, kind_of, walk
from megalite.prepare.hub import load_dataset
from megalite.prepare.reading import Shard, holds_text, is_json_lines, no_column, opened_parquet, pieces

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
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
        return [file for files, _ in collect_all(files_at, self.paths) for file in files]

    def plan(self) -> list[Shard]:
        """The shards, in order; all problems that show without reading everything, at once."""
        if self.kind == "hf":
            return _hub_shards(self)
        whole = collect_all(self._examined, self.files())
        size = shard_size(sum(shard.size for shard in whole))
        shards: list[Shard] = []
        for shard in whole:
            if shard.kind != "text":
                shards += _divided(shard, size)
            elif shards and shards[-1].kind == "text" and shards[-1].size < size:  # neighbouring texts share shards
                last = shards.pop()
                shards.append(replace(last, paths=last.paths + shard.paths, size=last.size + shard.size))
            else:
                shards.append(shard)
        return shards

    def _examined(self, path: Path) -> Shard:
        """A file as one shard: it can be opened, holds something, and begins as its kind does."""
        kind = "text" if self.kind == "stdlib" else kind_of(path) or "text"
        with refusing(path, CHECK):
            size = path.stat().st_size
            if size == 0 and self.kind != "stdlib":
                raise ValueError("is empty (0 bytes): remove it from data.path, or fill it")
        if kind == "json" and is_json_lines(path):
            kind = "jsonl"
        size *= UNPACKED if path.suffix.lower() in PACKED else 1
        shard = Shard(kind, (str(path),), size=size, column=self.column)
        if self.kind != "stdlib":  # refuse another kind, or a wrong column, before any work
            next(pieces(shard), None)
        return shard


def sources_of(data: DataConfig) -> list[Source]:
    """The parts of the data that must be tokenized, one per entry of data.path."""
    if data.source == "stdlib":
        return [Source("stdlib")]
    choice = data.text_column, data.subset, data.split, data.streaming
    return [Source(data.source, (path,), *choice) for path in paths_of(data)]


def not_read(sources: list[Source]) -> list[str]:
    """What lies beside the files that are read, in words: a line for each entry of data.path that has any."""
    paths = [path for source in sources if source.kind == "text" for path in source.paths]
    ignored = [(path, files_at(path)[1]) for path in paths]
    return [f"not read in {path}: {counted(names)}" for path, names in ignored if names]


def library_files() -> list[Path]:
    """The running Python's own modules, without tests and without what pip installed."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, names, members in os.walk(root):
        names[:] = [name for name in names if name not in NOT_LIBRARY]
        files.extend(Path(folder, member) for member in members if member.endswith(".py"))
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def shard_size(total: int) -> int:
    """Bytes per shard: many enough to share work and lose little to a kill, few enough to be cheap."""
    return min(max(total // SHARDS, SMALLEST), LARGEST)


def _divided(whole: Shard, size: int) -> list[Shard]:
    """A file as shards of about `size` bytes, where it can be read from the middle: lines, or groups of rows."""
    path = Path(whole.paths[0])
    if whole.kind == "jsonl" and path.suffix.lower() not in PACKED:
        cuts = [*range(0, whole.size, size), whole.size]
        return [replace(whole, start=at, stop=to, size=to - at) for at, to in pairwise(cuts)]
    if whole.kind != "parquet":
        return [whole]
    shards: list[Shard] = []
    with opened_parquet(path) as file:
        if not holds_text(kind := file.schema_arrow.field(whole.column).type):
            raise ValueError(f"column {whole.column!r} holds {kind}, not text")
        start = held = 0
        for number in range(1, file.num_row_groups + 1):
            group = file.metadata.row_group(number - 1)
            columns = [group.column(at) for at in range(group.num_columns)]
            held += sum(each.total_uncompressed_size for each in columns if each.path_in_schema == whole.column)
            if held >= size or number == file.num_row_groups:
                shards.append(replace(whole, start=start, stop=number, size=held))
                start, held = number, 0
    return shards


def _hub_shards(source: Source) -> list[Shard]:
    name = source.paths[0]
    rows = load_dataset(name, source.subset, source.split, source.streaming)
    with refusing(name, "set data.text_column to the one that holds the text"):
        if rows.column_names and source.column not in rows.column_names:
            raise ValueError(no_column(source.column, rows.column_names))
    common: dict[str, Any] = {"column": source.column, "subset": source.subset, "split": source.split}
    if source.streaming:
        count = rows.num_shards
        return [Shard("stream", (name,), number, count, **common) for number in range(count)]
    total, count = rows.dataset_size or len(rows) * HUB_ROW, len(rows)
    step = max(1, count * shard_size(total) // max(1, total))
    cuts = [(start, min(start + step, count)) for start in range(0, count, step)]
    return [Shard("rows", (name,), start, stop, total * (stop - start) // count, **common) for start, stop in cuts]
