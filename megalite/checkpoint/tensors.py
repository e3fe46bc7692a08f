"""Pieces to and from a folder, through `torch.distributed.checkpoint` (DCP).

DCP plans, writes one file per rank and reads any box from any boxes. Around it: a piece that several ranks hold is
written once, the load spread by size; every byte is hashed on its way to the file, so that a hash tells what was meant
to be there and not what a failing disk kept; a write error keeps its errno (DCP says "unexpected pos" of a full disk).
"""

import errno
import io
import os
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megalite.checkpoint.pieces import Piece, tiling_fault

FileRecord = tuple[int, str]  # bytes and xxh3_128 of one file


class LogicalTensor(Tensor):
    """All pieces of one logical tensor on this rank, in the form that DCP asks tensors for.

    Looks like a tensor of the logical shape and owns no storage; DCP only ever calls the three methods of its private
    `_Checkpointable` protocol.
    """

    pieces: list[Piece]

    @staticmethod
    def __new__(cls: type["LogicalTensor"], pieces: list[Piece]) -> "LogicalTensor":
        make = cast(Any, Tensor._make_wrapper_subclass)
        shape, dtype = pieces[0].logical_shape, pieces[0].tensor.dtype
        # Not on the meta device: DCP replaces meta tensors by fresh ones when it loads.
        return cast(LogicalTensor, make(cls, shape, dtype=dtype, device=torch.device("cpu")))

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        assert all(
            (piece.logical_shape, piece.tensor.dtype) == (pieces[0].logical_shape, pieces[0].tensor.dtype)
            and len(piece.offsets) == piece.tensor.dim() == len(piece.logical_shape)
            for piece in pieces
        ), f"pieces of {pieces[0].name} do not belong together"
        assert len({piece.offsets for piece in pieces}) == len(pieces), f"a piece of {pieces[0].name} is held twice"
        self.pieces = pieces

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any) -> Any:
        raise AssertionError(f"{operator} on a logical tensor: it has no values of its own")

    def gap(self) -> str | None:
        """What keeps these pieces alone from being the whole tensor."""
        return tiling_fault(self.size(), [(piece.offsets, piece.tensor.size()) for piece in self.pieces])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size()) for piece in self.pieces]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece.tensor for piece in self.pieces if piece.offsets == index.offset)


def logical_tensors(pieces: Sequence[Piece]) -> dict[str, LogicalTensor]:
    """The pieces by name, largest first: DCP hands each to the least loaded of its holders in this order."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    held = {name: LogicalTensor(parts) for name, parts in by_name.items()}
    return dict(sorted(held.items(), key=lambda item: (-max(part.tensor.nbytes for part in item[1].pieces), item[0])))


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


class _HashedFiles(FileSystem):
    """DCP's view of the file system: fresh files only, each recorded under its final name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        file = _HashingFile(Path(path))
        try:
            with io.BufferedWriter(file, 1 << 20) as stream:
                yield stream
                if not stream.closed:  # DCP syncs its index without flushing it first
                    stream.flush()
                    os.fsync(file.fileno())
        except Exception as error:
            if file.failure is None:
                raise
            raise OSError(file.failure.errno, file.failure.strerror, Path(path).name) from error
        if os.stat(path).st_size != file.written:
            raise OSError(errno.EIO, "the file system kept less than was written", Path(path).name)
        self.records[Path(path).name] = (file.written, file.hash.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """One file per rank, synced. One thread: with more, DCP loses the errors of the others and commits regardless."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.fs = self.files = _HashedFiles()

    def storage_meta(self) -> StorageMeta:
        """Nothing: DCP would note the temporary folder and a random id, and equal states would make unequal files."""
        return StorageMeta()


class TensorWrite:
    """One writing of all ranks' pieces into a fresh folder; collective over `group` (None: a single process)."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], group: dist.ProcessGroup | None) -> None:
        self.tensors = logical_tensors(pieces)
        self.group = group
        if group is None:  # DCP makes sure of it only where there are several ranks
            faults = {name: tensor.gap() for name, tensor in self.tensors.items()}
            assert not any(faults.values()), faults
        self.writer = _Writer(folder)
        # Names are flat already, and nested dicts would be pickled into the index.
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def run(self) -> dict[str, FileRecord]:
        """Write, and return this rank's files. Raises only this rank's own failure: the others' is theirs to tell."""
        try:
            with _no_advice():
                save(
                    dict(self.tensors),
                    storage_writer=self.writer,
                    planner=self.planner,
                    process_group=self.group,
                    no_dist=self.group is None,
                )
        except CheckpointException as error:
            own = error.failures.get(dist.get_rank(self.group) if self.group is not None else 0)
            if own is not None:
                raise own[0] from None
        return self.writer.files.records

    @property
    def planned_bytes(self) -> int:
        """Bytes of tensors that this rank was given to write; 0 before there is a plan."""
        plan = getattr(self.planner, "plan", None)
        written = [item.tensor_data for item in plan.items] if plan is not None else []
        return sum(prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in written if data is not None)


class _CheckedReader(FileSystemReader):
    """Reads by metadata that was checked before; never opens the pickle itself."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


def read_tensors(folder: Path, metadata: Metadata, pieces: Sequence[Piece], group: dist.ProcessGroup | None) -> None:
    """Fill the pieces' tensors from the folder; collective over `group`."""
    with _no_advice():
        load(
            dict(logical_tensors(pieces)),
            storage_reader=_CheckedReader(folder, metadata),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _no_advice() -> Generator[None, None, None]:
    """Silence DCP's remark that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
