"""Saves and finds checkpoints. All ranks call these functions at the same point, and all get the same outcome.

`save` returns after the commit, or raises the same CheckpointError on every rank with everything as it was before.
`newest` gives the newest checkpoint whose every byte is as written; damaged ones are reported and renamed, not deleted.
`of_step` gives the one that a person has named.
"""

import contextlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import commit
from megalite.checkpoint.commit import STATE
from megalite.checkpoint.manifest import MANIFEST, FileRecord, ForeignFormatError, Manifest, digest, file_fault
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.reading import read_pieces
from megalite.checkpoint.writing import HeldBox, data_file, plan_writes, stored_tensors, write_file
from megalite.config.durable_files import write_new
from megalite.config.user_files import read_bytes
from megalite.errors.problems import Problem, UserError
from megalite.launch.agreement import StorageFailure, on_first, together
from megalite.launch.context import ParallelContext

_EARLY_MANIFEST = "COMMIT.json"


class CheckpointError(Exception):
    """A checkpoint was not saved, or cannot be read. One line for people; earlier checkpoints are untouched."""


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

    def read_into(self, pieces: Sequence[Piece], *, unread: Callable[[str], bool] = lambda name: False) -> None:
        """Fill the tensors of `pieces`, whatever layout wrote them; collective.

        The union of all ranks' pieces must be exactly what was saved: every difference in name, shape or dtype is a
        problem of one UserError, raised before any tensor is touched. Tensors whose name is `unread` are left alone on
        both sides. A CheckpointError means that reading broke off half-way: the tensors are then of no use and the
        process should end.
        """
        saved = {name: tensor for name, tensor in self.manifest.tensors.items() if not unread(name)}
        try:
            read_pieces(self.path, saved, [piece for piece in pieces if not unread(piece.name)], self.context)
        except StorageFailure as failure:
            raise CheckpointError(f"{self.path} could not be read: {failure}") from failure


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
    assert keep >= 1, keep
    begun = time.perf_counter()
    temporary: Path | None = None
    held: list[list[HeldBox]] = []  # by rank, on rank 0
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    about = {"layout": asdict(context.layout), "versions": versions, **(labels or {})}

    def finish(plan: list[list[int]], records: list[list[Any]]) -> int:
        """On rank 0: state.json, the manifest and the commit; the bytes of the checkpoint. `records`: of the files."""
        assert temporary is not None
        content = (json.dumps(state, indent=1) + "\n").encode()
        write_new(temporary / STATE, content)
        files = {data_file(rank): FileRecord(*record) for rank, record in enumerate(records) if record}
        files[STATE] = FileRecord(len(content), digest(content))
        written = [[boxes[at] for at in chosen] for boxes, chosen in zip(held, plan, strict=True)]
        manifest = Manifest(step, about, files, stored_tensors(written))
        write_new(temporary / MANIFEST, manifest.render())
        if why := lost():
            raise OSError(why)
        commit.publish(temporary, step)
        return manifest.size

    def retire() -> None:
        with contextlib.suppress(OSError):  # it costs space, nothing else; the next save tries again
            commit.retire(folder, step, keep, good_before=good_before)

    try:
        temporary = Path(on_first(context, lambda: str(commit.begin(folder, step)), patient=True))
        for of_rank in context.gather_json([HeldBox.of(piece) for piece in pieces], to_first=True):
            held.append([HeldBox(name, dtype, *map(tuple, numbers)) for name, dtype, *numbers in of_rank])
        plan = on_first(context, lambda: plan_writes(held))
        mine, path = [pieces[at] for at in plan[context.rank]], temporary / data_file(context.rank)
        record = together(context, lambda: [*write_file(path, mine)] if mine else [], patient=True)
        records = context.gather_json(record, to_first=True)
        size = on_first(context, lambda: finish(plan, records), patient=True)
    except StorageFailure as failure:
        reason = str(failure)

        def clear_up() -> str:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)  # `recover` gets the rest
            return _not_saved(folder, step, reason, sum(box.bytes for box in {*chain(*held)}))

        raise CheckpointError(on_first(context, clear_up, patient=True)) from failure
    on_first(context, retire, patient=True)
    seconds = time.perf_counter() - begun
    return Saved(folder / commit.step_name(step), seconds, size, stall_s=seconds)


def _not_saved(folder: Path, step: int, reason: str, needed: int) -> str:
    """The one line that people read, when what was written has been deleted again."""
    room = ""
    with contextlib.suppress(OSError):
        free = commit.size_in_words(shutil.disk_usage(folder).free)
        about = f"It needs about {commit.size_in_words(needed)}; " if needed else ""  # 0: not known yet
        room = f" {about}{free} were free in {folder}."
    kept = commit.committed(folder)
    stays = f"{kept[0][1].name} stays the newest checkpoint" if kept else "there is no earlier checkpoint"
    return f"the checkpoint of step {step} was not saved: {reason}.{room} {stays}."


def newest(
    folder: Path, context: ParallelContext, report: Callable[[str], None], *, look_only: bool = False
) -> Found | None:
    """The newest undamaged checkpoint in `folder`; None if there is none at all.

    `report` is called on rank 0 for all that was passed over: other names, and damaged ones. If all are damaged the run
    is refused, with nothing renamed: starting again from nothing is for a person to decide. `look_only` renames nothing
    either: for readers that do not hold the run's lock.
    """
    damaged: list[tuple[Path, str]] = []
    for line in on_first(context, lambda: commit.passed_over(folder)):
        if context.rank == 0:
            report(line)
    for name in on_first(context, lambda: [path.name for _, path in commit.committed(folder)]):
        found, fault = _inspect(folder / name, context)
        if found is None:
            damaged.append((folder / name, fault))
            continue
        for line in on_first(context, lambda: [_passed_over(*each, look_only) for each in damaged]):
            if context.rank == 0:
                report(f"{line}. Going on from step {found.step}.")
        return found
    if damaged:
        remedy = "restore this folder from a copy, or set another run_dir to start from nothing"
        rule = "no checkpoint of this run can be read; "
        raise UserError([Problem(str(path), "damaged", rule + fault, remedy) for path, fault in damaged])
    return None


def _passed_over(path: Path, fault: str, look_only: bool) -> str:
    """Rename a damaged checkpoint, unless we only look; what to tell of it."""
    try:
        kept = "" if look_only else f"; kept as {commit.set_aside(path).name}"
    except OSError as error:
        kept = f"; it could not be renamed: {error.strerror}"
    return f"checkpoint {path.name} is damaged and was passed over: {fault}{kept}"


def saved_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The run's id and its settings in the newest checkpoint whose JSON files are intact, for one rank to judge by
    before all ranks verify it; nothing where all are damaged."""
    for _, path in commit.committed(folder):
        if "state" in (files := _read_json_files(path)):
            about = json.loads(files["manifest"])["about"]
            return about.get("run_id", ""), dict(files["state"]["config"])
    return "", {}


def of_step(folder: Path, step: int, context: ParallelContext) -> Found:
    """The checkpoint of `step`, which is a person's choice: UserError where there is none, or it is damaged."""
    steps = context.broadcast_object([at for at, _ in commit.committed(folder)])
    others = ", ".join(str(at) for at in sorted(steps) if at != step) or "none, in this run"
    if step not in steps:
        rule = f"there is no checkpoint of it in {folder}"
        raise UserError(Problem("step", step, rule, f"those there are: {others}"))
    found, fault = _inspect(folder / commit.step_name(step), context)
    if found is None:
        raise UserError(Problem("step", step, f"its checkpoint is damaged: {fault}", f"others: {others}"))
    return found


def _inspect(path: Path, context: ParallelContext) -> tuple[Found | None, str]:
    """The checkpoint at `path`, or what is wrong with it. Rank 0 reads its JSON, all ranks verify its files."""
    files: dict[str, Any] = on_first(context, lambda: _read_json_files(path))
    if "fault" in files:
        return None, files["fault"]
    manifest = Manifest.parse(files["manifest"].encode(), _step_of(path))
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    mine = by_size[context.rank :: context.world_size]
    faults = [fault for name in mine if (fault := file_fault(path, name, manifest.files[name])) is not None]
    everyone = [fault for of_rank in context.gather_json(list(faults)) for fault in of_rank]
    if everyone:
        return None, "; ".join(everyone[:3]) + (f"; and {len(everyone) - 3} more files" if everyone[3:] else "")
    return Found(path, manifest, files["state"], context), ""


def _read_json_files(path: Path) -> dict[str, Any]:
    """Manifest and state of a checkpoint, or {"fault": why not}. UserError where another version has written it."""
    try:
        if (path / _EARLY_MANIFEST).exists() and not (path / MANIFEST).exists():
            raise ForeignFormatError(f"an early megalite wrote it (it has {_EARLY_MANIFEST})")
        content = read_bytes(path / MANIFEST, follow_links=False)
        manifest = Manifest.parse(content, _step_of(path))
        if fault := file_fault(path, STATE, manifest.files[STATE]):
            return {"fault": fault}
        return {"manifest": content.decode(), "state": json.loads(read_bytes(path / STATE))}
    except ForeignFormatError as error:
        remedy = "go on with the megalite that wrote it, or export its weights with it and set checkpoint.init_from"
        raise UserError(Problem(str(path), "of another version", str(error), remedy)) from error
    except UserError as error:
        return {"fault": f"{MANIFEST} {error.problems[0].rule}"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {"fault": f"{MANIFEST} is damaged: {error}"}


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
