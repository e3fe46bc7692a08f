"""DCP's index of a checkpoint (`.metadata`), read without trusting it.

The file is a pickle, and unpickling may run any code. Here it can only build DCP's own plain records: every class it
names must be on a short list. What comes out is checked before anything is loaded by it: only tensors (DCP would
unpickle byte entries freely), every part present, no file outside the checkpoint's own.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from megalite.checkpoint.pieces import tiling_fault

_RECORDS = (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)


class UntrustedMetadataError(Exception):
    """The index names something it has no business naming, or does not describe what is in the files."""


def _member(owner: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """Stands for `getattr`, by which Python 3.11.0 to 3.11.3 pickle a member of an enum; the records have one enum."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise UntrustedMetadataError(f"it asks for {name!r} of {owner!r}, which a checkpoint never needs")
    return _MEM_FORMAT_ENCODING[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,  # a look-up of torch.strided by name
}


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        raise UntrustedMetadataError(f"it asks for {module}.{name}, which a checkpoint never needs")


def read_metadata(content: bytes, file_sizes: Mapping[str, int]) -> Metadata:
    """DCP's metadata from the bytes of `.metadata`, for a checkpoint that consists of the files `file_sizes`."""
    try:
        metadata = _AllowListUnpickler(io.BytesIO(content)).load()
        _check(metadata, file_sizes)
    except UntrustedMetadataError:
        raise
    except Exception as error:  # a made-up pickle can fail in any way; every one of them means the same
        raise UntrustedMetadataError(f"it cannot be read: {type(error).__name__}: {error}") from error
    assert isinstance(metadata, Metadata)
    return metadata


def _check(metadata: Any, file_sizes: Mapping[str, int]) -> None:
    if not isinstance(metadata, Metadata):
        raise UntrustedMetadataError("it holds no index")
    for name, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            raise UntrustedMetadataError(f"{name} is not a tensor")
        fault = tiling_fault(saved.size, [(chunk.offsets, chunk.sizes) for chunk in saved.chunks])
        if fault is not None:
            raise UntrustedMetadataError(f"{name} {fault}")
        for chunk in saved.chunks:
            where = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if where is None:
                raise UntrustedMetadataError(f"{name} has no data at {tuple(chunk.offsets)}")
            _check_place(name, where, file_sizes)


def _check_place(name: str, where: _StorageInfo, file_sizes: Mapping[str, int]) -> None:
    """The data must lie within a file of the manifest, as it was written: no path to elsewhere, no decoders."""
    if where.relative_path not in file_sizes:
        raise UntrustedMetadataError(f"{name} is kept in {where.relative_path!r}, which is not part of the checkpoint")
    if where.offset < 0 or where.length < 0 or where.offset + where.length > file_sizes[where.relative_path]:
        raise UntrustedMetadataError(f"{name} reaches beyond the end of {where.relative_path}")
    if where.transform_descriptors:
        raise UntrustedMetadataError(f"{name} is encoded in a way that megalite does not write")
