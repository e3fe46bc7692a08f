"""Finds the files that an entry of data.path means, and counts what lies beside them unread.

A folder stands for every text file in it and below, in the order of their paths. Links are followed, and each folder is
read once, however many links lead to it. A folder that cannot be read is refused.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator
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


def kind_of(path: Path) -> str | None:
    """What a file's name says that it holds; None if it does not say."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in PACKED:
        return KINDS.get(suffixes[0])
    return KINDS.get(suffixes[-1]) if suffixes else None


def files_at(path: str) -> tuple[list[Path], Counter[str]]:
    """The files that one entry of data.path means, in order, and how many of which suffix lie beside them unread."""
    place, ignored = Path(path).expanduser().absolute(), Counter[str]()
    with refusing(place, CHECK):
        if place.is_dir():
            found = sorted(walk(place))
            files = [file for file in found if kind_of(file)]
            ignored.update(file.suffix or "without a suffix" for file in found if not kind_of(file))
            rule = f"the folder holds no {', '.join(KINDS)} file; it holds: {counted(ignored) or 'nothing'}"
        elif glob.has_magic(path) and not place.exists():
            pattern = str(Path(path).expanduser())  # the working directory's own name is no pattern
            found = sorted({Path(match).absolute() for match in glob.glob(pattern, recursive=True)})
            files = [match for match in found if not match.is_dir()]
            if len(found) > len(files) and "**" not in path:  # `**` reads what is in the folders that it matches
                ignored["folders"] = len(found) - len(files)
            rule = f"the glob matches no file{', only folders' if found else ''}"
        else:
            files, rule = [place], ""
        if not files:
            raise UserError(Problem("data.path", path, rule, "give the files themselves, or a quoted glob of files"))
        for file in files:
            if not file.is_file():
                there = os.path.lexists(file)
                rule = "is no regular file, or a link to nothing" if there else "there is no such file or folder"
                remedy = "give txt, jsonl, json, csv or parquet files, a folder of them or a glob"
                raise UserError(Problem("data.path", str(file), rule, remedy))
    return files, ignored


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
