"""COMMIT.json: what a checkpoint consists of, to the byte.

It lists every file with its size and xxh3_128, and holds the hash of itself; a folder is a checkpoint if and only if
its manifest is intact and every file is as listed. The file's bytes are a function of its fields, so any change shows,
even one that JSON would read over. The hashes guard against accidents (a torn copy, a bad disk), not against a forger.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "COMMIT.json"
STATE = "state.json"
METADATA = ".metadata"  # DCP's index
FORMAT = 1
_CHUNK = 1 << 22


class DamagedError(Exception):
    """Why a folder is not a complete checkpoint."""


class NewerFormatError(Exception):
    """The checkpoint is intact and written by a later megalite."""


@dataclass(frozen=True)
class Manifest:
    """What COMMIT.json says. `about` is for people: run, layout, versions."""

    step: int
    about: dict[str, Any]
    files: dict[str, tuple[int, str]]  # name -> bytes, xxh3_128

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.files.values())

    def render(self) -> bytes:
        """The one way to write these fields."""
        files = {name: [size, digest] for name, (size, digest) in self.files.items()}
        return _render({"format": FORMAT, "step": self.step, "about": self.about, "files": files})

    @classmethod
    def parse(cls, content: bytes, step: int) -> "Manifest":
        """The manifest of a folder named for `step`; raises DamagedError or NewerFormatError."""
        try:
            fields = json.loads(content)
            version = int(fields["format"])
            intact = _render({key: value for key, value in fields.items() if key != "hash"}) == content
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{MANIFEST} is damaged ({type(error).__name__})") from error
        if not intact:
            raise DamagedError(f"{MANIFEST} is damaged (its hash does not match)")
        if version > FORMAT:
            raise NewerFormatError(f"it has format {version}; this megalite reads up to {FORMAT}")
        try:
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in fields["files"].items()}
            manifest = cls(int(fields["step"]), dict(fields["about"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
        if manifest.step != step:
            raise DamagedError(f"{MANIFEST} says that it is step {manifest.step}")
        for name in manifest.files:
            if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
                raise DamagedError(f"{MANIFEST} names {name!r}, which is not a file of the checkpoint's own folder")
        for name in (STATE, METADATA):
            if name not in manifest.files:
                raise DamagedError(f"{MANIFEST} does not list {name}")
        return manifest


def digest(content: bytes) -> str:
    """The hash that manifests hold."""
    return xxhash.xxh3_128(content).hexdigest()


def _render(fields: Mapping[str, Any]) -> bytes:
    body = json.dumps(fields, indent=1, sort_keys=True)
    return json.dumps({**fields, "hash": digest(body.encode())}, indent=1, sort_keys=True).encode() + b"\n"


def read_own_file(folder: Path, name: str) -> bytes:
    """A small file of the checkpoint, not followed elsewhere through a link."""
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return file.read()


def file_fault(folder: Path, name: str, size: int, expected: str) -> str | None:
    """What is wrong with a file of a checkpoint; None if it is as its manifest says."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        linked = (folder / name).is_symlink()
        return f"{name} is a link to elsewhere" if linked else f"{name} cannot be opened: {error.strerror}"
    with open(descriptor, "rb", buffering=0) as file:
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != size:
                return f"{name} has {status.st_size:,} bytes where {size:,} were written"
            found = xxhash.xxh3_128()
            while chunk := file.read(_CHUNK):
                found.update(chunk)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    if found.hexdigest() != expected:
        return f"{name} is damaged: its content hashes to {found.hexdigest()[:8]}, {expected[:8]} was written"
    return None


def shares(files: Mapping[str, tuple[int, str]], ranks: int) -> list[list[str]]:
    """The files split over ranks by size, largest first to the least loaded; every rank works out the same."""
    split: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(files, key=lambda name: (-files[name][0], name)):
        rank = min(range(ranks), key=lambda rank: load[rank])
        split[rank].append(name)
        load[rank] += files[name][0]
    return split
