"""manifest.json: it lists every file and every tensor of a checkpoint, and it ends with its own hash.

A folder is a checkpoint if and only if its manifest is intact and every file has the listed size and xxh3_128. Each
tensor is listed with the boxes that it was cut into and the place of each box in a safetensors file. The hashes find
accidents (a torn copy, a bad disk). They do not stop a forger, so a manifest is checked before anything follows it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from megalite.checkpoint.commit import step_of
from megalite.checkpoint.pieces import is_tiled
from megalite.errors.problems import Problem, UserError

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


@dataclass(frozen=True)
class Manifest:
    """The fields of manifest.json. `about` is for people: run, layout, versions."""

    step: int
    about: dict[str, Any]
    files: dict[str, FileRecord]
    tensors: dict[str, StoredTensor]

    def render(self) -> bytes:
        """The content of the file: one line for each field, the hash of the lines before in the last one."""
        fields = {"format": FORMAT, **vars(self)}
        return _sealed(b"{\n" + b"".join(f'"{name}": {json.dumps(fields[name])},\n'.encode() for name in fields))

    @classmethod
    def parse(cls, content: bytes, checkpoint: Path) -> "Manifest":
        """The manifest of the folder `checkpoint`; a ValueError says why the content is none. UserError where another
        version of megalite has written it."""
        if content != _sealed(content[: -len(_sealed(b""))]):
            raise ValueError("its hash does not match")
        fields = json.loads(content)
        if fields["format"] != FORMAT:
            rule = f"it has format {fields['format']}; this megalite reads format {FORMAT}"
            remedy = "go on with the megalite that wrote it, or export its weights with it and set checkpoint.init_from"
            raise UserError(Problem(str(checkpoint), "of another version", rule, remedy))
        if fields["step"] != step_of(checkpoint):
            raise ValueError(f"it says that it is step {fields['step']}")
        files = {name: FileRecord(*record) for name, record in fields["files"].items()}
        tensors = {
            name: StoredTensor(dtype, tuple(shape), [StoredBox(*box[:2], *map(tuple, box[2:])) for box in boxes])
            for name, (dtype, shape, boxes) in fields["tensors"].items()
        }
        return cls(fields["step"], fields["about"], files, tensors)

    def check(self) -> None:
        """ValueError unless the files lie in the checkpoint's folder and their boxes make up the whole tensors."""
        if outside := [name for name in self.files if "/" in name]:
            raise ValueError(f"it names {outside[0]!r}, which is not a file of the checkpoint's own folder")
        for name, (_, shape, boxes) in self.tensors.items():
            if not is_tiled(shape, [box[2:] for box in boxes]) or any(box.file not in self.files for box in boxes):
                raise ValueError(f"the parts of {name} are not the whole tensor, each element once")


def _sealed(body: bytes) -> bytes:
    return body + f'"hash": "{digest(body)}"\n}}\n'.encode()


def digest(content: bytes) -> str:
    """The hash that manifests hold."""
    return xxhash.xxh3_128(content).hexdigest()


def file_fault(folder: Path, name: str, expected: FileRecord) -> str | None:
    """What is wrong with a file of a checkpoint; None if it is as the manifest says."""
    try:
        with open(folder / name, "rb", buffering=0) as file:
            found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == expected.hash else f"{name} is damaged"
