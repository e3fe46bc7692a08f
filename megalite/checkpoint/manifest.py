"""Boxes of logical tensors, the only thing that a checkpoint holds, and the manifest that lists them.

A logical tensor is the unsharded one; a rank holds boxes of it. So what one layout wrote, another can read:
data-parallel replicas hold equal boxes, a tensor-parallel shard is one box, and a flat range of a ZeRO-1 buffer is a
few boxes (`boxes`). Nothing is gathered to save.

A folder is a checkpoint if and only if its manifest.json is intact and every file has the listed xxh3_128. The manifest
ends with its own hash. The hashes find accidents (a torn copy, a bad disk). They do not stop a forger, so a manifest is
checked before anything follows it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from megalite.checkpoint.commit import step_of
from megalite.errors.problems import Problem, UserError

MANIFEST = "manifest.json"
FORMAT = 2
DTYPES = {  # of a training state, by safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
Box = tuple[Sequence[int], Sequence[int]]  # offsets and sizes, one of each per dimension


@dataclass(frozen=True, eq=False)
class Piece:
    """The box of logical tensor `name` that starts at `offsets` and has the shape of `tensor`.

    A whole tensor has offsets 0. The tensor may be a view of a larger buffer; loading writes through it.
    """

    name: str
    logical_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def key(self) -> str:
        """The name in a safetensors file: the logical one, followed by the offsets (`name@8,0`) of a part."""
        is_whole = tuple(self.tensor.shape) == self.logical_shape
        return self.name if is_whole else f"{self.name}@{','.join(map(str, self.offsets))}"


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The elements [start, stop) of a row-major tensor as boxes: (offsets, sizes, first flat index), in flat order.

    Each box is contiguous in the flat range: some rows of the outermost dimension that has a row beginning at its first
    element and ending before `stop`. There are at most 2N-1 for N dimensions: the rows grow, then shrink again.
    """
    assert 0 <= start <= stop <= prod(shape), (start, stop, shape)
    if not shape:
        return [((), (), 0)] * (stop - start)
    strides, found = [prod(shape[dim + 1 :]) for dim in range(len(shape))], []
    while start < stop:
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        dim = next(dim for dim, row in enumerate(strides) if start % row == 0 and start + row <= stop)
        rows = min((stop - start) // strides[dim], shape[dim] - offsets[dim])
        found.append((offsets, (*[1] * dim, rows, *shape[dim + 1 :]), start))
        start += rows * strides[dim]
    return found


def is_tiled(shape: Sequence[int], parts: Iterable[Box]) -> bool:
    """Whether `parts` cover every element of a tensor of `shape` exactly once.

    The number of parts that cover an element is a function of its place. The mixed difference of this function over
    all dimensions is +1 or -1 at the corners of every part, 0 elsewhere, and it determines the function. So the parts
    tile the tensor if and only if their corners add up to those of the tensor.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    ends = [((-1) ** sum(end), end) for end in product((0, 1), repeat=len(shape))]
    for sign, offsets, sizes in ((-1, [0] * len(shape), shape), *((1, *part) for part in parts)):
        if not len(offsets) == len(sizes) == len(shape) or min(sizes, default=0) < 0:
            return False
        for parity, end in ends:
            corners[tuple(at + size * one for at, size, one in zip(offsets, sizes, end, strict=True))] += sign * parity
    return not any(corners.values())


class StoredBox(NamedTuple):
    """One box of a tensor: its elements lie in row-major order from byte `start` of `file` on."""

    file: str
    start: int
    offsets: Sequence[int]
    sizes: Sequence[int]


class StoredTensor(NamedTuple):
    """A logical tensor and the boxes that cover it. `dtype` is a key of DTYPES."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[StoredBox]


@dataclass(frozen=True)
class Manifest:
    """The fields of manifest.json. `about` is for people: run, layout, versions."""

    step: int
    about: dict[str, Any]
    files: dict[str, tuple[int, str]]  # size and xxh3_128 of each
    tensors: dict[str, StoredTensor]

    def render(self) -> bytes:
        """The content of the file: one line for each field, the hash of the lines before in the last one."""
        fields = {"format": FORMAT, **vars(self)}
        return _sealed(b"{\n" + b"".join(f'"{name}": {json.dumps(fields[name])},\n'.encode() for name in fields))

    @classmethod
    def parse(cls, content: bytes, checkpoint: Path) -> "Manifest":
        """The checked manifest of the folder `checkpoint`; a ValueError says why the content is none. UserError where
        another version of megalite has written it."""
        if content != _sealed(content[: -len(_sealed(b""))]):
            raise ValueError("its hash does not match")
        fields = json.loads(content)
        if fields["format"] != FORMAT:
            rule = f"it has format {fields['format']}; this megalite reads format {FORMAT}"
            remedy = "go on with the megalite that wrote it, or export its weights with it and set checkpoint.init_from"
            raise UserError(Problem(str(checkpoint), "of another version", rule, remedy))
        if fields["step"] != step_of(checkpoint):
            raise ValueError(f"it says that it is step {fields['step']}")
        files = {name: (size, expected) for name, (size, expected) in fields["files"].items()}
        tensors = {
            name: StoredTensor(dtype, tuple(shape), [StoredBox(*box) for box in stored])
            for name, (dtype, shape, stored) in fields["tensors"].items()
        }
        manifest = cls(fields["step"], fields["about"], files, tensors)
        manifest.check()
        return manifest

    def check(self) -> None:
        """ValueError unless the files lie in the checkpoint's folder and their boxes make up the whole tensors."""
        if outside := [name for name in self.files if "/" in name]:
            raise ValueError(f"it names {outside[0]!r}, which is not a file of the checkpoint's own folder")
        for name, (_, shape, stored) in self.tensors.items():
            if not is_tiled(shape, [box[2:] for box in stored]) or any(box.file not in self.files for box in stored):
                raise ValueError(f"the parts of {name} are not the whole tensor, each element once")


def _sealed(body: bytes) -> bytes:
    return body + f'"hash": "{digest(body)}"\n}}\n'.encode()


def digest(content: bytes) -> str:
    """The hash that manifests hold."""
    return xxhash.xxh3_128(content).hexdigest()


def file_fault(folder: Path, name: str, expected: str) -> str | None:
    """What is wrong with a file of a checkpoint; None if it has the `expected` hash."""
    try:
        with open(folder / name, "rb", buffering=0) as file:
            found = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == expected else f"{name} is damaged"
