"""manifest.json: it lists every file and every tensor of a checkpoint, and it ends with its own hash.

A folder is a checkpoint if and only if its manifest is intact and every file has the listed size and xxh3_128. Each
tensor is listed with the boxes that it was cut into and the place of each box in a safetensors file. The hashes find
accidents (a torn copy, a bad disk). They do not stop a forger, so a manifest is checked before anything follows it.
"""

import json
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from megalite.checkpoint.pieces import tiling_fault

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 2
CHUNK_BYTES = 1 << 20  # read or written at a time: it stays in the processor's cache while it is hashed

# The names that safetensors gives to the dtypes of a training state.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


class DamagedError(Exception):
    """Why a folder is not a complete checkpoint."""


class ForeignFormatError(Exception):
    """The checkpoint is not damaged, but another version of megalite wrote it in a format that this one cannot read."""


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

    @classmethod
    def parse(cls, dtype: str, shape: list[int], boxes: list[Any]) -> "StoredTensor":
        """From JSON; TypeError or ValueError where it is something else."""
        stored = [StoredBox(str(file), int(start), _ints(at), _ints(sizes)) for file, start, at, sizes in boxes]
        return cls(str(dtype), _ints(shape), stored)


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
        """The manifest of a folder named for `step`; raises DamagedError or ForeignFormatError."""
        if content != _sealed(content[: -len(_sealed(b""))]):
            raise DamagedError(f"{MANIFEST} is damaged (its hash does not match)")
        try:
            fields = json.loads(content)
            version = int(fields["format"])
            if version > FORMAT:
                raise ForeignFormatError(f"it has format {version}; this megalite reads format {FORMAT}")
            files = {str(name): FileRecord(int(size), str(digest)) for name, (size, digest) in fields["files"].items()}
            tensors = {str(name): StoredTensor.parse(*tensor) for name, tensor in fields["tensors"].items()}
            manifest = cls(int(fields["step"]), dict(fields["about"]), files, tensors)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{MANIFEST} is not a manifest ({type(error).__name__})") from error
        if manifest.step != step:
            raise DamagedError(f"{MANIFEST} says that it is step {manifest.step}")
        manifest._check()
        return manifest

    def _check(self) -> None:
        """DamagedError where a file is none of this folder, or the boxes of a tensor are not all of it."""
        for name in self.files:
            if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
                raise DamagedError(f"{MANIFEST} names {name!r}, which is not a file of the checkpoint's own folder")
        if STATE not in self.files:
            raise DamagedError(f"{MANIFEST} does not list {STATE}")
        for name, tensor in self.tensors.items():
            fault = tiling_fault(tensor.shape, [(box.offsets, box.sizes) for box in tensor.boxes])
            if tensor.dtype not in DTYPES:
                fault = f"has the unknown dtype {tensor.dtype}"
            if fault is not None:
                raise DamagedError(f"{MANIFEST} is not a manifest: {name} {fault}")
            for box in tensor.boxes:
                end = box.start + prod(box.sizes) * DTYPES[tensor.dtype].itemsize
                if box.file not in self.files or box.start < 0 or end > self.files[box.file].size:
                    raise DamagedError(f"{MANIFEST} is not a manifest: {name} does not lie within {box.file!r}")


def _ints(numbers: list[int]) -> tuple[int, ...]:
    return tuple(map(int, numbers))


def _sealed(body: bytes) -> bytes:
    return body + f'"hash": "{digest(body)}"\n}}\n'.encode()


def digest(content: bytes) -> str:
    """The hash that manifests hold."""
    return xxhash.xxh3_128(content).hexdigest()


def read_own_file(folder: Path, name: str) -> bytes:
    """The content of a small file of the checkpoint, which must not be a link."""
    with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read()


def file_fault(folder: Path, name: str, expected: FileRecord) -> str | None:
    """What is wrong with a file of a checkpoint; None if it is as the manifest says."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != expected.size:
                return f"{name} has {status.st_size:,} bytes where {expected.size:,} were written"
            found, chunk = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
            while count := file.readinto(chunk):
                found.update(chunk[:count])
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        linked = (folder / name).is_symlink()
        return f"{name} is a link to elsewhere" if linked else f"{name} cannot be read: {error.strerror}"
    if found.hexdigest() != expected.hash:
        return f"{name} is damaged: its content hashes to {found.hexdigest()[:8]}, {expected.hash[:8]} was written"
    return None
