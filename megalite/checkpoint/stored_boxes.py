"""Boxes of tensors out of a checkpoint's files: of each file only the bytes that somebody asks for.

The files hold each box as `torch.save` wrote it: a zip archive whose entry `data/0` is the elements in row-major order,
not compressed. Whoever wants a part of a box reads the elements from the part's first to its last. So the ranks of a
larger data-parallel group read a smaller share each, whatever layout wrote the files; and nothing is unpickled.
"""

import errno
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megalite.checkpoint.pieces import Box, Piece

_LOCAL_HEADER = 30  # bytes in front of an entry's name; the lengths of name and padding are its last two fields


@dataclass(frozen=True)
class _Part:
    """What a stored box and a live tensor have in common: `target`, a view of the tensor, is at `at` in the box."""

    name: str
    start: int  # of the stored box in its file
    length: int
    sizes: tuple[int, ...]  # of the stored box
    at: tuple[int, ...]
    target: Tensor


def read_boxes(folder: Path, metadata: Metadata, pieces: Sequence[Piece]) -> None:
    """Fill the pieces' tensors. Their names, shapes and dtypes must be the index's; OSError where the files are not."""
    by_file: dict[str, list[_Part]] = {}
    for piece in pieces:
        for file, part in _parts(metadata, piece):
            by_file.setdefault(file, []).append(part)
    for file, parts in sorted(by_file.items()):
        descriptor = os.open(folder / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for part in sorted(parts, key=lambda part: part.start):
                _read(descriptor, file, part)
        finally:
            os.close(descriptor)


def _parts(metadata: Metadata, piece: Piece) -> Iterator[tuple[str, _Part]]:
    """The file of each stored box that overlaps `piece`, and the part."""
    saved = metadata.state_dict_metadata[piece.name]
    assert isinstance(saved, TensorStorageMetadata)
    live = piece.tensor.detach()
    for chunk in saved.chunks:
        overlap = _overlap((chunk.offsets, chunk.sizes), (piece.offsets, live.shape))
        if overlap is None:
            continue
        offsets, sizes = overlap
        place = metadata.storage_data[MetadataIndex(piece.name, chunk.offsets)]
        at = tuple(offset - first for offset, first in zip(offsets, chunk.offsets, strict=True))
        window = tuple(
            slice(offset - first, offset - first + size)
            for offset, first, size in zip(offsets, piece.offsets, sizes, strict=True)
        )
        part = _Part(piece.name, place.offset, place.length, tuple(chunk.sizes), at, live[window])
        yield place.relative_path, part


def _overlap(one: Box, other: Box) -> Box | None:
    """Offsets and sizes of what two boxes share; None if that is nothing."""
    offsets = [max(a, b) for a, b in zip(one[0], other[0], strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)]
    sizes = [end - offset for offset, end in zip(offsets, ends, strict=True)]
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def _read(descriptor: int, file: str, part: _Part) -> None:
    """Fill the target with elements [first, first + reach) of the stored box, the shortest range that holds it."""
    dtype = part.target.dtype
    try:
        data = _data_start(descriptor, part, prod(part.sizes) * dtype.itemsize)
    except Exception as error:  # a made-up archive can fail in any way; every one of them means the same
        raise OSError(errno.EIO, f"{part.name} is not where it was written ({error})", file) from error
    strides = [prod(part.sizes[dim + 1 :]) for dim in range(len(part.sizes))]
    first = sum(at * stride for at, stride in zip(part.at, strides, strict=True))
    reach = sum((size - 1) * stride for size, stride in zip(part.target.shape, strides, strict=True)) + 1
    elements = torch.empty(reach, dtype=dtype)
    _read_fully(descriptor, elements.view(torch.uint8).numpy().data, data + first * dtype.itemsize)
    part.target.copy_(elements.as_strided(part.target.shape, strides))


def _data_start(descriptor: int, part: _Part, size: int) -> int:
    """Where in the file the `size` bytes of a stored box's elements begin."""
    with zipfile.ZipFile(_Range(descriptor, part.start, part.length)) as archive:
        [entry] = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    if entry.file_size != size or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.file_size} bytes, not {size}")
    header = bytearray(_LOCAL_HEADER)
    _read_fully(descriptor, memoryview(header), part.start + entry.header_offset)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    data = entry.header_offset + _LOCAL_HEADER + names
    if not 0 <= data <= part.length - size:
        raise ValueError("it lies elsewhere")
    return part.start + data


def _read_fully(descriptor: int, into: memoryview, start: int) -> None:
    done = 0
    while done < len(into):  # one call reads at most 2 GiB
        count = os.preadv(descriptor, [into[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends there")
        done += count


class _Range(io.RawIOBase):
    """`length` bytes of a file as a file of their own."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "negative seek")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._length - self._at))
        found = os.preadv(self._descriptor, [memoryview(buffer)[:count]], self._start + self._at)
        self._at += found
        return found
