"""Saves checkpoints: boxes of live tensors into one safetensors file per rank, the rest as JSON, then the commit.

All ranks call `save` at the same point. It returns after the commit, or raises the same CheckpointError on every rank
with everything as it was before. Rank 0 assigns the boxes: one that several ranks hold (replicas) is written by one of
them, so that the bytes are spread evenly. A file is streamed from the live tensors, header first:
`safetensors.torch.save_file` would hold all of them a second time. Every byte is hashed on its way to the file, so that
the hash is that of the intended content and not of what a failing disk kept.
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash

from megalite.checkpoint import commit
from megalite.checkpoint.commit import STATE, step_name
from megalite.checkpoint.manifest import DTYPES, MANIFEST, FileRecord, Manifest, StoredBox, StoredTensor, digest
from megalite.checkpoint.pieces import Piece
from megalite.config.files import write_new
from megalite.launch.context import ParallelContext, StorageFailure, all_ranks_or_raise, rank0_broadcast

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(Exception):
    """A checkpoint was not saved. One line for people; earlier checkpoints are untouched."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint and what it took: `seconds` until it was on disk, `stall_s` of them without training."""

    path: Path
    seconds: float
    bytes: int
    stall_s: float


def save(
    folder: Path,
    step: int,
    pieces: Sequence[Piece],
    state: Mapping[str, Any],
    context: ParallelContext,
    keep: int,
    *,
    good_before: int = 0,
    labels: Mapping[str, str] | None = None,
    lost: Callable[[], str | None] = lambda: None,
) -> Saved:
    """Write the checkpoint of `step` into `folder`, then delete all but the newest `keep`, and the newest before step
    `good_before`.

    The disk may take longer than parallel.timeout_s on any rank. `state` is plain JSON, equal on all ranks. `labels` go
    into the manifest for people (run, data). `lost` is asked on rank 0 right before the commit: a job whose lock was
    taken over must not commit into another's run.
    """
    begun = time.perf_counter()
    temporary: Path | None = None
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    about = {"layout": asdict(context.layout), "versions": versions, **(labels or {})}
    try:
        temporary = place = Path(rank0_broadcast(context, lambda: str(commit.begin(folder, step)), patient=True))
        held = context.gather_json([(piece.key, piece.tensor.nbytes) for piece in pieces], to_first=True)
        mine = [pieces[at] for at in rank0_broadcast(context, lambda: plan_writes(held))[context.rank]]
        path = place / f"rank-{context.rank:05d}.safetensors"
        written = all_ranks_or_raise(context, lambda: write_file(path, mine) if mine else [], patient=True)
        records = context.gather_json(written, to_first=True)
        size = rank0_broadcast(context, lambda: _commit(place, step, about, records, state, lost), patient=True)
    except StorageFailure as failure:
        if temporary is not None and context.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # `recover` gets the rest
        context.barrier(patient=True)
        message = f"the checkpoint of step {step} was not saved: {failure}; earlier checkpoints stay."
        raise CheckpointError(message) from failure
    rank0_broadcast(context, lambda: commit.retire(folder, step, keep, good_before=good_before), patient=True)
    seconds = time.perf_counter() - begun
    return Saved(folder / step_name(step), seconds, size, stall_s=seconds)


def plan_writes(held: Sequence[Sequence[tuple[str, int]]]) -> list[list[int]]:
    """The numbers of the boxes that each rank writes, among the boxes (key, bytes) that it holds: each box is given to
    the least loaded of the ranks that hold it, largest box first."""
    holders: dict[tuple[str, int], list[int]] = {}
    for rank, boxes in enumerate(held):
        for key, size in boxes:
            holders.setdefault((key, size), []).append(rank)
    load, writer = [0] * len(held), dict[str, int]()
    for key, size in sorted(holders, key=lambda box: (-box[1], box[0])):
        writer[key] = min(holders[key, size], key=load.__getitem__)
        load[writer[key]] += size
    return [[at for at, (key, _) in enumerate(boxes) if writer[key] == rank] for rank, boxes in enumerate(held)]


def write_file(path: Path, pieces: Sequence[Piece]) -> list[Any]:
    """Write the pieces into a new safetensors file that is on disk when the call returns; the file's name and record,
    and a list for each piece: name, dtype, logical shape and the fields of its StoredBox."""
    pieces = sorted(pieces, key=lambda piece: -piece.tensor.itemsize)  # wide elements first, which aligns all of them
    dtypes = [_DTYPE_NAMES[piece.tensor.dtype] for piece in pieces]
    ends = [0, *accumulate(piece.tensor.nbytes for piece in pieces)]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for piece, dtype, span in zip(pieces, dtypes, pairwise(ends), strict=True):
        entries[piece.key] = {"dtype": dtype, "shape": piece.tensor.shape, "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header, hashed = len(text).to_bytes(8, "little") + text, xxhash.xxh3_128()
    with open(path, "xb") as file:
        for data in chain([memoryview(header)], map(_content, pieces)):
            hashed.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        record = FileRecord(file.tell(), hashed.hexdigest())
    boxes = [
        [piece.name, dtype, piece.logical_shape, path.name, len(header) + start, piece.offsets, piece.tensor.shape]
        for piece, dtype, start in zip(pieces, dtypes, ends, strict=False)
    ]
    return [path.name, record, boxes]


def _content(piece: Piece) -> memoryview:
    """The bytes of a piece, without a copy where they lie in host memory in row-major order."""
    return piece.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _commit(
    temporary: Path,
    step: int,
    about: dict[str, Any],
    records: Sequence[Sequence[Any]],
    state: Mapping[str, Any],
    lost: Callable[[], str | None],
) -> int:
    """Write state.json and the manifest, and commit; the bytes of the checkpoint. `records`: a name and the result of
    `write_file` from each rank that has written."""
    content = (json.dumps(state, indent=1) + "\n").encode()
    write_new(temporary / STATE, content)
    written = [record for record in records if record]
    files = {name: FileRecord(*record) for name, record, _ in written}
    files[STATE] = FileRecord(len(content), digest(content))
    tensors: dict[str, StoredTensor] = {}
    for name, dtype, shape, *box in chain.from_iterable(boxes for _, _, boxes in written):
        stored = tensors.setdefault(name, StoredTensor(dtype, shape, []))
        assert stored[:2] == (dtype, shape), f"boxes of {name} differ in dtype or logical shape"
        stored.boxes.append(StoredBox(*box))
    manifest = Manifest(step, about, files, tensors)
    manifest.check()  # a state with a gap is a bug of ours, found before the commit
    write_new(temporary / MANIFEST, manifest.render())
    if why := lost():
        raise OSError(why)
    commit.publish(temporary, step)
    return sum(record.size for record in files.values())
