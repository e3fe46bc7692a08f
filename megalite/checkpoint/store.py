"""Save and find checkpoints. All ranks call these functions at the same point; what one sees, all act on.

`save` returns after the commit, or raises the same CheckpointError on every rank with everything as it was before.
`newest` gives the newest checkpoint whose every byte is as written; damaged ones are told and renamed, not deleted.
`of_step` gives the one that a person has named.
"""

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import commit
from megalite.checkpoint.failure import CheckpointError, StorageFailure, gather, together
from megalite.checkpoint.manifest import (
    MANIFEST,
    STATE,
    DamagedError,
    Manifest,
    NewerFormatError,
    digest,
    file_fault,
    read_own_file,
    shares,
)
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.reading import read_pieces
from megalite.checkpoint.room import size_in_words
from megalite.checkpoint.writing import FileRecord, TensorWrite
from megalite.config.problems import Problem, UserError
from megalite.parallel.context import ParallelContext

__all__ = ["CheckpointError", "Found", "Piece", "Saved", "newest", "of_step", "save"]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint and what it took: `seconds` until it was on disk, `stall_s` of them without training."""

    path: Path
    seconds: float
    bytes: int
    stall_s: float


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified. Its files are read only by `read_into`."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    context: ParallelContext

    @property
    def step(self) -> int:
        return self.manifest.step

    def read_into(self, pieces: Sequence[Piece], *, unread: str | None = None) -> None:
        """Fill the tensors of `pieces`, whatever layout wrote them; collective.

        The union of all ranks' pieces must be exactly what was saved: every difference in name, shape or dtype is a
        problem of one UserError, raised before any tensor is touched. Tensors of kind `unread` (`unread.NAME`), which
        the caller can derive, are left alone on both sides. A CheckpointError means that reading broke off
        half-way: the tensors are then of no use and the process should end.
        """
        wanted = [piece for piece in pieces if _kind(piece.name) != unread]
        read_pieces(self.path, self.manifest, wanted, self.context, passed_over=lambda name: _kind(name) == unread)


def save(
    folder: Path,
    step: int,
    pieces: Sequence[Piece],
    state: Mapping[str, Any],
    context: ParallelContext,
    keep: int,
    *,
    labels: Mapping[str, str] | None = None,
    owned: Callable[[], bool] = lambda: True,
) -> Saved:
    """Write the checkpoint of `step` into `folder`, then delete all but the newest `keep`.

    `state` is plain JSON, equal on all ranks. `labels` go into the manifest for people (run, data). `owned` is asked on
    rank 0 right before the commit: a job whose lock was taken over must not commit into another's run.
    """
    assert keep >= 1, keep
    begun = time.perf_counter()
    free: list[int] = []
    temporary: Path | None = None
    write: TensorWrite | None = None

    def begin() -> str:
        path = commit.begin(folder, step)
        free.append(shutil.disk_usage(folder).free)
        return str(path)

    try:
        name = together(context, lambda: begin() if context.rank == 0 else "")
        temporary = Path(context.broadcast_object(name))
        write = TensorWrite(temporary, context)
        files = write.run(pieces)
        about = _about(context, labels)
        bytes_written = together(
            context, lambda: _commit(temporary, step, files, state, about, owned) if context.rank == 0 else 0
        )
    except StorageFailure as failure:
        message = ""
        if context.rank == 0:
            if temporary is not None:
                commit.discard(temporary)
            message = _not_saved(folder, step, str(failure), write.planned_bytes if write else 0, free)
        raise CheckpointError(context.broadcast_object(message)) from failure
    total = context.broadcast_object(bytes_written)
    if context.rank == 0:
        _retire(folder, step, keep)
    seconds = time.perf_counter() - begun
    return Saved(folder / commit.step_name(step), seconds, total, stall_s=seconds)


def _commit(
    temporary: Path,
    step: int,
    files: dict[str, FileRecord],
    state: Mapping[str, Any],
    about: dict[str, Any],
    owned: Callable[[], bool],
) -> int:
    """Rank 0: the JSON files, then the commit. Returns the bytes of the checkpoint."""
    content = (json.dumps(state, indent=1) + "\n").encode()
    commit.write_synced(temporary / STATE, content)
    manifest = Manifest(step, about, {**files, STATE: (len(content), digest(content))})
    commit.write_synced(temporary / MANIFEST, manifest.render())
    if not owned():
        raise OSError("another job has taken over the run folder")
    commit.publish(temporary, step)
    return manifest.size


def _retire(folder: Path, step: int, keep: int) -> None:
    """An old checkpoint that cannot be deleted costs space, nothing else; the next save tries again."""
    try:
        commit.retire(folder, step, keep)
    except OSError:
        return


def _about(context: ParallelContext, labels: Mapping[str, str] | None) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"layout": asdict(context.layout), "versions": versions, **(labels or {})}


def _not_saved(folder: Path, step: int, reason: str, planned: int, free: list[int]) -> str:
    """The one line that people read."""
    room = (
        f" It needs about {size_in_words(planned)}; {size_in_words(free[0])} were free in {folder}."
        if planned and free
        else ""
    )
    kept = commit.committed(folder)
    stays = f"{kept[0][1].name} stays the newest checkpoint" if kept else "there is no earlier checkpoint"
    return f"the checkpoint of step {step} was not saved: {reason}.{room} {stays}."


def _kind(name: str) -> str:
    return name.partition(".")[0]


def newest(
    folder: Path, context: ParallelContext, report: Callable[[str], None], *, look_only: bool = False
) -> Found | None:
    """The newest undamaged checkpoint in `folder`; None if there is none at all.

    `report` is called on rank 0 for every damaged one that was passed over. If all are damaged the run is refused, with
    nothing renamed: starting again from nothing is for a person to decide. `look_only` renames nothing either: for
    readers that do not hold the run's lock.
    """
    names = [path.name for _, path in commit.committed(folder)] if context.rank == 0 else []
    damaged: list[tuple[str, str]] = []
    for name in context.broadcast_object(names):
        found, fault = _inspect(folder / name, context)
        if found is not None:
            if context.rank == 0:
                _pass_over(folder, damaged, found.step, report, look_only)
            context.barrier()  # names are final before any rank goes on
            return found
        damaged.append((name, fault))
    if damaged:
        raise UserError(
            [
                Problem(
                    str(folder / name),
                    "damaged",
                    f"no checkpoint of this run can be read; {fault}",
                    "restore this folder from a copy, or set another run_dir to start from nothing",
                )
                for name, fault in damaged
            ]
        )
    return None


def _pass_over(
    folder: Path, damaged: list[tuple[str, str]], used: int, report: Callable[[str], None], look_only: bool
) -> None:
    for name, fault in damaged:
        try:
            kept = "" if look_only else f"; kept as {commit.set_aside(folder / name).name}"
        except OSError as error:
            kept = f"; it could not be renamed: {error.strerror}"
        report(f"checkpoint {name} is damaged and was passed over: {fault}{kept}. Going on from step {used}.")


def of_step(folder: Path, step: int, context: ParallelContext) -> Found:
    """The checkpoint of `step`, which is a person's choice: UserError where there is none, or it is damaged."""
    steps = [at for at, _ in commit.committed(folder)] if context.rank == 0 else []
    steps = context.broadcast_object(steps)
    others = ", ".join(str(at) for at in sorted(steps) if at != step) or "none, in this run"
    if step not in steps:
        raise UserError(
            Problem("step", step, f"there is no checkpoint of it in {folder}", f"those there are: {others}")
        )
    found, fault = _inspect(folder / commit.step_name(step), context)
    if found is None:
        raise UserError(Problem("step", step, f"its checkpoint is damaged: {fault}", f"others: {others}"))
    return found


def _inspect(path: Path, context: ParallelContext) -> tuple[Found | None, str]:
    """The checkpoint at `path`, or what is wrong with it. Rank 0 reads its JSON, all ranks verify its files."""
    said: dict[str, Any] = _read_json_files(path) if context.rank == 0 else {}
    said = context.broadcast_object(said)
    if "newer" in said:
        problem = Problem(str(path), "newer", said["newer"], "use the megalite that wrote it, or another run_dir")
        raise UserError(problem)
    if "fault" in said:
        return None, said["fault"]
    manifest = Manifest.parse(said["manifest"].encode(), int(path.name.removeprefix("step-")))
    mine = shares(manifest.files, context.world_size)[context.rank]
    faults = [fault for name in mine if (fault := file_fault(path, name, *manifest.files[name])) is not None]
    everyone = [fault for of_rank in gather(context, list(faults)) for fault in of_rank]
    if everyone:
        return None, "; ".join(everyone[:3]) + (f"; and {len(everyone) - 3} more files" if everyone[3:] else "")
    return Found(path, manifest, said["state"], context), ""


def _read_json_files(path: Path) -> dict[str, Any]:
    """Rank 0: manifest and state of a checkpoint, or {"fault": why not}, or {"newer": what}."""
    try:
        content = read_own_file(path, MANIFEST)
        manifest = Manifest.parse(content, int(path.name.removeprefix("step-")))
        fault = file_fault(path, STATE, *manifest.files[STATE])
        if fault is not None:
            return {"fault": fault}
        return {"manifest": content.decode(), "state": json.loads(read_own_file(path, STATE))}
    except FileNotFoundError:
        return {"fault": f"it has no {MANIFEST}: it was not written, or not copied, completely"}
    except OSError as error:
        return {"fault": f"{MANIFEST} cannot be read: {error.strerror}"}
    except NewerFormatError as error:
        return {"newer": str(error)}
    except (DamagedError, ValueError) as error:
        return {"fault": str(error)}
