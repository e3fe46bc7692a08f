"""Finds the documents that a source's name covers, and divides them into shards, the same in every process.

A folder stands for every text file in it and below, in the order of their paths. Links are followed, and each folder is
read once, however many links lead to it. A folder that cannot be read is refused.
"""

import glob
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from megalite.config.files import refusing
from megalite.config.schema import DataConfig
from megalite.data.open import digest, paths_of
from megalite.errors.problems import Problem, UserError, collect_all
from megalite.prepare.hub import load_dataset
from megalite.prepare.reading import KINDS, PACKED, REPAIR, Shard, pieces

NOT_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo")
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
        if self.kind == "hf" and not os.path.exists(self.paths[0]):
            return digest(self.kind, self.paths, self.column, self.subset, self.split)
        states = [(str(path), path.stat()) for path in self.files]
        files = [(path, state.st_size, state.st_mtime_ns) for path, state in states]
        return digest(self.kind, self.column, self.subset, self.split, files)

    def plan(self) -> list[Shard]:
        """The shards, in order; all problems that show without reading everything, at once."""
        whole = [self._data_set()] if self.kind == "hf" else collect_all(self._file, self.files)
        size = shard_size(sum(shard.size for shard in whole))
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
        kind = "text" if self.kind == "stdlib" else _kind_of(path) or "text"
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


def sources_of(data: DataConfig) -> list[Source]:
    """The parts of the data that must be tokenized, one per entry of data.path."""
    if data.source == "stdlib":
        return [Source("stdlib")]
    choice = data.text_column, data.subset, data.split, data.streaming
    return [Source(data.source, (path,), *choice) for path in paths_of(data)]


def shard_size(total: int) -> int:
    """Bytes per shard: many enough to share work and lose little to a kill, few enough to be cheap."""
    return min(max(total // SHARDS, SMALLEST), LARGEST)


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
