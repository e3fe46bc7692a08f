"""Saves checkpoints: boxes of live tensors into one safetensors file per rank, the rest as JSON, then the commit.

All ranks call `save` at the same point. It returns after the commit, or raises the same CheckpointError on every rank
with everything as it was before. Rank 0 assigns the boxes: one that several ranks hold (replicas) is written by one of
them, so that the bytes are spread evenly. A file is streamed from the live tensors, header first:
`safetensors.torch.save_file` would hold all of them a second time. Every byte is hashed on its way to the file, so that
the hash is that of the intended content and not of what a failing disk kept.

Behind the training (`BackgroundSaves`) the pieces are copied to host memory, and a thread saves the copies. Training
waits for the copy alone, and on CUDA only before the next update.
"""

import json
import os
import platform
import shutil
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megalite.checkpoint import commit
from megalite.checkpoint.commit import STATE, step_name
from megalite.checkpoint.manifest import DTYPES, MANIFEST, Manifest, Piece, StoredBox, StoredTensor, digest
from megalite.config.files import write_new
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 256  # bytes, of the copies on CUDA


class CheckpointError(Exception):
    """A checkpoint was not saved. One line for people; earlier checkpoints are untouched."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint and what it took: `seconds` until it was on disk, `stall_s` of them without training."""

    path: Path
    seconds: float
    bytes: int
    stall_s: float


Write = Callable[[Sequence[Piece], ParallelContext], Saved]


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
    spared: Callable[[], int | None] = lambda: None,
) -> Saved:
    """Write the checkpoint of `step` into `folder`, then delete all but the newest `keep`, the newest before step
    `good_before` and that of the step `spared`. The disk may take longer than parallel.timeout_s on any rank.

    `state` is plain JSON, equal on all ranks. `labels` go into the manifest for people (run, data). `lost` is asked on
    rank 0 right before the commit: a job whose lock was taken over must not commit into another's run.
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
    except OSError as failure:
        if temporary is not None and context.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # `recover` gets the rest
        context.barrier()
        message = f"the checkpoint of step {step} was not saved: {failure}; earlier checkpoints stay."
        raise CheckpointError(message) from failure
    retire = partial(commit.retire, folder, step, keep, good_before=good_before, spared=spared())
    rank0_broadcast(context, retire, patient=True)
    seconds = time.perf_counter() - begun
    return Saved(folder / step_name(step), seconds, size, stall_s=seconds)


def plan_writes(held: Sequence[Sequence[tuple[str, int]]]) -> list[list[int]]:
    """The numbers of the boxes that each rank writes, among the boxes (key, bytes) that it holds: each box is given to
    the least loaded of the ranks that hold it, largest box first."""
    holders = defaultdict[tuple[str, int], list[tuple[int, int]]](list)  # of a box: rank, and its number there
    for rank, boxes in enumerate(held):
        for at, (key, size) in enumerate(boxes):
            holders[key, size].append((rank, at))
    load, writes = [0] * len(held), [list[int]() for _ in held]
    for key, size in sorted(holders, key=lambda box: (-box[1], box[0])):
        rank, at = min(holders[key, size], key=lambda holder: load[holder[0]])
        load[rank] += size
        writes[rank].append(at)
    return writes


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
        record = file.tell(), hashed.hexdigest()
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
    files = {STATE: (len(content), digest(content)), **{name: tuple(record) for name, record, _ in written}}
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
    return sum(size for size, _ in files.values())


class BackgroundSaves:
    """Begins saves on one rank. All ranks begin the same ones, in the same order, each after the `result` of the one
    before.

    The thread's collectives use a group of their own ("saving"), so they never meet those of the training. The thread
    is a daemon, so the process can exit without it. On CUDA the copies are pinned (a copy to other memory would hold up
    the host), and used again. A stream of its own copies while the next forward and backward run, which do not modify
    saved tensors. Code that does must call `before_change` first.
    """

    def __init__(self, context: ParallelContext) -> None:
        alone = context.control_group is None
        self._context = context if alone else replace(context, control_group=context.group("saving"))
        self._device = context.device
        self._pinned: list[Tensor] = []  # the copies on CUDA
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reading: torch.cuda.Event | None = None  # until it has happened the pieces must stay as they are

    def begin(self, pieces: Sequence[Piece], write: Write, *, begun: float) -> "Future[Saved]":
        """Copy the pieces and have `write(copies, context)` called in a thread. `begun`: see `Saved.stall_s`.

        The future is of this rank: others may still be at their part when it is done. Its CheckpointErrors are the
        same on all ranks.
        """
        copies, wait = self.copies_of(pieces)
        stall_s = time.perf_counter() - begun
        saving: Future[Saved] = Future()

        def work() -> None:
            try:
                if self._side is not None:
                    torch.cuda.set_device(self._device)  # a new thread starts on the first one
                wait()
                saved = write(copies, self._context)
                copies.clear()  # before anybody can see that it is over
                saving.set_result(replace(saved, seconds=time.perf_counter() - begun, stall_s=stall_s))
            except BaseException as error:
                saving.set_exception(error)

        threading.Thread(target=work, name="checkpoint", daemon=True).start()
        return saving

    @torch.no_grad()
    def copies_of(self, pieces: Sequence[Piece]) -> tuple[list[Piece], Callable[[], None]]:
        """The pieces with contiguous tensors in host memory, and a call that returns when these are filled.

        On CUDA the pieces have the same shapes every time, and the copies of the call before are overwritten.
        """
        live, wait = [piece.tensor for piece in pieces], lambda: None
        if self._side is None:
            copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in live]
        else:
            self._pinned = copies = self._pinned or self._pin(live)
            self._side.wait_stream(torch.cuda.current_stream(self._device))  # whose kernels complete the state
            with torch.cuda.stream(self._side):
                for copy, tensor in zip(copies, live, strict=True):
                    copy.copy_(tensor, non_blocking=True)
            self._reading = self._side.record_event()
            wait = self._reading.synchronize
        return [replace(piece, tensor=copy) for piece, copy in zip(pieces, copies, strict=True)], wait

    def _pin(self, live: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors of the same shapes in one block, pinned as it is: what torch pins itself has powers of two
        bytes. They are valid as long as this object."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in live]
        block, cudart = torch.empty(sum(sizes), dtype=torch.uint8), torch.cuda.cudart()
        with suppress(RuntimeError):  # a system may lock less memory: then copies take longer
            torch.cuda.check_error(cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
            # Memory that is freed while CUDA holds it for pinned gives wrong numbers to whoever copies there next.
            weakref.finalize(self, lambda block: cudart.cudaHostUnregister(block.data_ptr()), block).atexit = False
        parts = zip(block.split(sizes), live, strict=True)
        return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in parts]

    def before_change(self) -> None:
        """What is put on the current stream from now on waits, on the device, for the copies of the last save."""
        if self._reading is not None:
            torch.cuda.current_stream(self._device).wait_event(self._reading)
            self._reading = None
