"""manifest.json: it lists every file and every tensor of a checkpoint, and it ends with its own hash.

A folder is a checkpoint if and only if its manifest is intact and every file has the listed size and xxh3_128. Each
tensor is listed with the boxes that it was cut into and the place of each box in a safetensors file. The hashes find
accidents (a torn copy, a bad disk). They do not stop a forger, so a manifest is checked before anything follows it.
"""

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from megalite.checkpoint.commit import STATE
from megalite.checkpoint.pieces import tiling_fault

MANIFEST = "manifest.json"
FORMAT = 2

# The names that safetensors gives to the dtypes of a training state.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


class FileRecord(NamedTuple):
    """Size and xxh3_128 of one file."""

    size: int
    hash: str


class StoredBox(NamedTuple):
    """One box of a tensor: its elements lie in row-major order from byte `start` of `file` on."""

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A logical tensor and the boxes that cover it."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    boxes: list[StoredBox]


class ForeignFormatError(Exception):
    """Another version of megalite wrote the checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """The fields of manifest.json. `about` is for people: run, layout, versions."""

    step: int
    about: dict[str, Any]
    files: dict[str, FileRecord]
    tensors: dict[str, StoredTensor]

    @property
    def size(self) -> int:
        """Bytes of all listed files."""
        return sum(record.size for record in self.files.values())

    def render(self) -> bytes:
        """The content of the file: one line for each field, the hash of the lines before in the last one."""
        fields = {"format": FORMAT, **vars(self)}
        return _sealed(b"{\n" + b"".join(f'"{name}": {json.dumps(fields[name])},\n'.encode() for name in fields))

    @classmethod
    def parse(cls, content: bytes, step: int) -> "Manifest":
        """The manifest of a folder named for `step`. An error says why it is none: another version's or step's, torn,
        or (a forger's, behind the right hash) with files of other folders, boxes that are not all of a tensor, or
        boxes outside of their file.
        """
        if content != _sealed(content[: -len(_sealed(b""))]):
            raise ValueError("its hash does not match")
        fields = json.loads(content)
        if fields["format"] != FORMAT:
            raise ForeignFormatError(f"it has format {fields['format']}; this megalite reads format {FORMAT}")
        if fields["step"] != step:
            raise ValueError(f"it says that it is step {fields['step']}")
        files = {name: FileRecord(*record) for name, record in fields["files"].items()}
        if STATE not in files:
            raise ValueError(f"it does not list {STATE}")
        for name in files:
            if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
                raise ValueError(f"it names {name!r}, which is not a file of the checkpoint's own folder")
        tensors = {}
        for name, (dtype, shape, boxes) in fields["tensors"].items():
            stored = [StoredBox(file, start, tuple(at), tuple(sizes)) for file, start, at, sizes in boxes]
            tensors[name] = StoredTensor(dtype, tuple(shape), stored)
            if dtype not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {dtype}")
            for box in stored:
                end = box.start + prod(box.sizes) * DTYPES[dtype].itemsize
                if box.file not in files or box.start < 0 or end > files[box.file].size:
                    raise ValueError(f"{name} does not lie within {box.file!r}")
            if fault := tiling_fault(shape, [box[2:] for box in stored]):
                raise ValueError(f"{name} {fault}")
        return cls(step, fields["about"], files, tensors)


def _sealed(body: bytes) -> bytes:
    return body + f'"hash": "{digest(body)}"\n}}\n'.encode()


def digest(content: bytes) -> str:
    """The hash that manifests hold."""
    return xxhash.xxh3_128(content).hexdigest()


def file_fault(folder: Path, name: str, expected: FileRecord) -> str | None:
    """What is wrong with a file of a checkpoint; None if it is as the manifest says."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != expected.size:
                return f"{name} has {status.st_size:,} bytes where {expected.size:,} were written"
            found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == expected.hash else f"{name} is damaged: its content hashes to {found[:8]}, not as written"
