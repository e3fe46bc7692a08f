"""Finds the files that an entry of data.path means, and counts what lies beside them unread.

A folder stands for every text file in it and below, in the order of their paths. Links are followed, and each folder is
read once, however many links lead to it. A folder that cannot be looked into is refused.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megalite.config.user_files import refusing
from megalite.errors.problems import Problem, UserError

KINDS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
PACKED = {".gz": "gzip", ".zst": "zstd"}  # may follow any of these; parquet packs itself
CHECK = "check the path and its permissions"


@dataclass(frozen=True)
class Found:
    """Files to read, in order, and how many files of which suffix are not."""

    files: list[Path]
    ignored: Counter[str] = field(default_factory=Counter)


def kind_of(path: Path) -> str | None:
    """What a file's name says that it holds; None if it does not say."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in PACKED:
        return KINDS.get(suffixes[0])
    return KINDS.get(suffixes[-1]) if suffixes else None


def files_at(path: str) -> Found:
    """The files that one entry of data.path means."""
    place = Path(path).expanduser().absolute()
    with refusing(place, CHECK):
        if place.is_dir():
            found = _in_folder(path, place)
        elif glob.has_magic(path) and not place.exists():
            found = _of_glob(path)
        elif place.exists():
            found = Found([place])
        else:
            rule = f"there is no such file or folder (looked in {place.parent})"
            remedy = "give a txt, jsonl, json, csv or parquet file, a folder of them or a glob"
            raise UserError(Problem("data.path", path, rule, remedy))
        for file in found.files:
            if not file.is_file():
                rule = "is no regular file, or a link to nothing: it is read several times, so a pipe will not do"
                raise UserError(Problem("data.path", str(file), rule, "write its text to a file first, or remove it"))
    return found


def counted(names: Counter[str]) -> str:
    """For people: the most frequent names and how often there are any."""
    shown = ", ".join(f"{count:,} {name}" for name, count in names.most_common(8))
    return f"{shown} and {len(names) - 8} kinds more" if len(names) > 8 else shown


def walk(top: Path) -> Iterator[Path]:
    """All that lies in a folder and below and is no folder; links are followed, but to each folder once."""
    seen = set()

    def fail(error: OSError) -> None:
        rule = f"cannot be looked into ({error.strerror})"
        raise UserError(Problem("data.path", error.filename, rule, "allow reading it, or give the folders beside it"))

    for folder, names, members in os.walk(top, onerror=fail, followlinks=True):
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in seen:
            names.clear()
            continue
        seen.add((state.st_dev, state.st_ino))
        names.sort()
        yield from (Path(folder, member) for member in members)


def _in_folder(path: str, place: Path) -> Found:
    files = sorted(walk(place))
    texts = [file for file in files if kind_of(file)]
    ignored = Counter(file.suffix or "without a suffix" for file in files if not kind_of(file))
    if not texts:
        rule = f"the folder holds no {', '.join(KINDS)} file; it holds: {counted(ignored) or 'nothing'}"
        raise UserError(Problem("data.path", path, rule, "give the files themselves, or a glob"))
    return Found(texts, ignored)


def _of_glob(path: str) -> Found:
    matches = {Path(match).absolute() for match in glob.glob(str(Path(path).expanduser()), recursive=True)}
    folders = {match for match in matches if match.is_dir()}
    if folders == matches:
        rule = f"the glob matches no file{', only folders' if folders else ''}"
        raise UserError(Problem("data.path", path, rule, "check it with ls, and quote it in the shell"))
    # `**` reads what is in the folders that it matches, another pattern does not.
    ignored = Counter({"folders": len(folders)} if folders and "**" not in path else {})
    return Found(sorted(matches - folders), ignored)
