"""Pieces into a folder, in the format of `torch.distributed.checkpoint` (DCP): a file of tensors per rank and an index.

Who writes what is our own plan (write_plan.py), told in a little JSON; DCP itself would send a pickle of every box to
rank 0 and back, and hold all of a rank's tensors a second time while it writes them. Every byte is hashed on its way to
the file, so that a hash tells what was meant to be there and not what a failing disk kept; a write error keeps its
errno (torch says "unexpected pos" of a full disk).
"""

import errno
import io
import os
import pickle
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megalite.checkpoint.failure import gather_to_first, together
from megalite.checkpoint.manifest import METADATA
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.write_plan import WritePlan, held, plan_writes, share
from megalite.parallel.context import ParallelContext

FileRecord = tuple[int, str]  # bytes and xxh3_128 of one file
Places = list[list[int]]  # first byte and length of each tensor in a rank's file, in the order of the plan


class TensorWrite:
    """One writing of all ranks' pieces into a fresh folder."""

    def __init__(self, folder: Path, context: ParallelContext) -> None:
        self._folder = folder
        self._context = context
        self._records: dict[str, FileRecord] = {}  # this rank's
        self._plan: WritePlan | None = None  # on rank 0

    @property
    def planned_bytes(self) -> int:
        """Bytes of all ranks' tensors, on rank 0; 0 before there is a plan."""
        return self._plan.bytes if self._plan is not None else 0

    def run(self, pieces: Sequence[Piece]) -> dict[str, FileRecord]:
        """Write this rank's share of the pieces; collective. Returns all ranks' files on rank 0.

        A StorageFailure is the same on all ranks.
        """
        context = self._context
        everyone = gather_to_first(context, held(pieces))
        self._plan = together(context, lambda: plan_writes(everyone) if everyone is not None else None)
        marks = context.broadcast_object(self._plan.marks if self._plan is not None else None)
        places = together(context, lambda: self._write(share(pieces, marks[context.rank])))
        said = gather_to_first(context, [places, list(self._records.items())])
        together(context, lambda: self._write_index([places for places, _ in said]) if said is not None else None)
        of_all = {name: (size, hashed) for _, files in said or [] for name, (size, hashed) in files}
        return {**of_all, **self._records}

    def _write(self, pieces: Sequence[Piece]) -> Places:
        """This rank's file."""
        places = []
        with self._new_file(_data_file(self._context.rank)) as file:
            for piece in pieces:
                start = file.tell()
                torch.save(_alone(piece.tensor), cast(IO[bytes], _OnlyWrites(file)))
                places.append([start, file.tell() - start])
        return places

    def _write_index(self, places: Sequence[Places]) -> None:
        """`.metadata`, by rank 0. Nothing in it depends on when or where it is written."""
        assert self._plan is not None
        metadata = _metadata(self._plan, places)
        with self._new_file(METADATA) as file:
            pickle.dump(metadata, file)

    @contextmanager
    def _new_file(self, name: str) -> Generator[io.BufferedIOBase, None, None]:
        """A new file that is on disk, and in the records, when the context ends."""
        file = _HashingFile(self._folder / name)
        try:
            with io.BufferedWriter(file, 1 << 20) as stream:
                yield stream
                stream.flush()
                os.fsync(file.fileno())
        except Exception as error:
            if file.failure is None:
                raise
            raise OSError(file.failure.errno, file.failure.strerror, name) from error
        if os.stat(self._folder / name).st_size != file.written:
            raise OSError(errno.EIO, "the file system kept less than was written", name)
        self._records[name] = (file.written, file.hash.hexdigest())


class _HashingFile(io.FileIO):
    """A new file that hashes what is written to it and remembers why a write failed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")
        self.hash = xxhash.xxh3_128()
        self.written = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.hash.update(memoryview(data)[:written])
        self.written += written
        return written


class _OnlyWrites(io.RawIOBase):
    """A stream that `torch.save` cannot flush: it would after every tensor, and most are small."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in host memory, in row-major order, on a storage of its own size: `torch.save` writes whole storages.

    Without a copy where it can be: a view of the same memory.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.numel() == 0:
        return tensor.clone()
    return torch.frombuffer(tensor.view(-1).view(torch.uint8).numpy(), dtype=tensor.dtype).view(tensor.shape)


def _metadata(plan: WritePlan, places: Sequence[Places]) -> Metadata:
    properties = {dtype: TensorProperties(dtype=dtype) for dtype, _ in plan.tensors.values()}
    tensors = {
        name: TensorStorageMetadata(properties[dtype], torch.Size(shape), [])
        for name, (dtype, shape) in plan.tensors.items()
    }
    where = {}
    for rank, (boxes, of_rank) in enumerate(zip(plan.boxes, places, strict=True)):
        for box, (start, length) in zip(boxes, of_rank, strict=True):
            chunks = tensors[box.name].chunks
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            where[MetadataIndex(box.name, chunk.offsets, len(chunks))] = _StorageInfo(_data_file(rank), start, length)
            chunks.append(chunk)
    return Metadata(cast(Any, tensors), storage_data=where, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)


def _data_file(rank: int) -> str:
    """DCP's name for the one file of a rank."""
    return f"__{rank}_0.distcp"
