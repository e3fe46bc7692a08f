"""Fill live tensors from a verified checkpoint, after everything that can be checked has been.

A load that fails half-way leaves tensors of two states mixed, and one that ignores what nobody asks for loses state in
silence. So names, shapes and dtypes are compared here, over all ranks, before the first write.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megalite.checkpoint.failure import CheckpointError, StorageFailure, together
from megalite.checkpoint.manifest import METADATA, Manifest, digest, read_own_file
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.stored_boxes import read_boxes
from megalite.checkpoint.trusted_metadata import UntrustedMetadataError, read_metadata
from megalite.config.problems import Problem
from megalite.parallel.context import ParallelContext

_OTHER_MODEL = "use the model and optimizer of the run that wrote it, or another run_dir"
_SHOWN = 10  # tensors named for each kind of difference


def read_pieces(
    path: Path,
    manifest: Manifest,
    pieces: Sequence[Piece],
    context: ParallelContext,
    passed_over: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill `pieces` from the checkpoint at `path`; see `Found.read_into`. Saved names `passed_over` need no reader."""
    metadata, problems = _metadata(path, manifest)
    context.agree(problems)
    assert metadata is not None
    saved = {
        name: tensor
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)  # always: `read_metadata` accepts nothing else
        and not passed_over(name)
    }
    context.agree([*_differences(path, saved, pieces), *_not_asked_for(path, list(saved), pieces, context)])
    try:
        together(context, lambda: read_boxes(path, metadata, pieces))
    except StorageFailure as failure:
        raise CheckpointError(f"{path} could not be read: {failure}") from failure


def _metadata(path: Path, manifest: Manifest) -> tuple[Metadata | None, list[Problem]]:
    """DCP's index, from the very bytes that the manifest vouches for."""
    remedy = "restore this folder from a copy, or delete it to go on from the checkpoint before"
    try:
        content = read_own_file(path, METADATA)
        if digest(content) != manifest.files[METADATA][1]:
            return None, [Problem(str(path / METADATA), "changed", "it has changed since it was verified", remedy)]
        return read_metadata(content, {name: size for name, (size, _) in manifest.files.items()}), []
    except OSError as error:
        return None, [Problem(str(path / METADATA), "unreadable", f"it cannot be read: {error.strerror}", remedy)]
    except UntrustedMetadataError as error:
        return None, [Problem(str(path / METADATA), "refused", str(error), remedy)]


def _differences(path: Path, saved: Mapping[str, TensorStorageMetadata], pieces: Sequence[Piece]) -> list[Problem]:
    """Tensors of this rank that the checkpoint lacks or holds in another shape or dtype."""
    problems = []
    live = {piece.name: piece for piece in pieces}
    missing = sorted(live.keys() - saved.keys())
    if missing:
        rule = f"the checkpoint has no tensor {_some(missing)}"
        problems.append(Problem(str(path), f"{len(missing)} missing", rule, _OTHER_MODEL))
    shapes = [
        f"{name} is {list(saved[name].size)} there and {list(piece.logical_shape)} here"
        for name, piece in sorted(live.items())
        if name in saved and tuple(saved[name].size) != piece.logical_shape
    ]
    if shapes:
        problems.append(Problem(str(path), f"{len(shapes)} of another shape", _some(shapes), _OTHER_MODEL))
    dtypes = [
        f"{name} is {saved[name].properties.dtype} there and {piece.tensor.dtype} here"
        for name, piece in sorted(live.items())
        if name in saved and saved[name].properties.dtype != piece.tensor.dtype
    ]
    if dtypes:
        remedy = "use the precision of the run that wrote it, or another run_dir"
        problems.append(Problem(str(path), f"{len(dtypes)} of another dtype", _some(dtypes), remedy))
    return problems


def _not_asked_for(path: Path, saved: list[str], pieces: Sequence[Piece], context: ParallelContext) -> list[Problem]:
    """Tensors of the checkpoint that no rank has a piece of: state that would be lost in silence."""
    live = {piece.name for piece in pieces}
    names = sorted(saved)  # the same on all ranks: all have read the same bytes
    asked = torch.tensor([name in live for name in names], dtype=torch.uint8)  # [tensors]
    if context.control_group is not None and names:
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=context.control_group)
    left = [name for name, wanted in zip(names, asked.tolist(), strict=True) if not wanted]
    if not left:
        return []
    return [Problem(str(path), f"{len(left)} left over", f"this run has no tensor {_some(left)}", _OTHER_MODEL)]


def _some(items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
