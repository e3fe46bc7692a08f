"""Opens the folder of a run: for one job at a time, and only for a run that may go on in it.

    run.json       what stays the same over all continuations: the run's id and the fingerprint of its data
    config.yaml    the resolved settings of the latest start
    lock           the job that runs now
    checkpoints/   see commit.py

Rank 0 alone decides by what is on disk, since others may see it late on NFS; they only make sure that it is one disk
for all. A start that is refused leaves nothing behind.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from megalite.checkpoint.commit import committed, recover, replace_synced, sync_folder
from megalite.checkpoint.lock import LockHeldError, RunLock, holder_of
from megalite.checkpoint.resume_rules import compare
from megalite.checkpoint.store import saved_config
from megalite.config.run_dir import LOCK, RUN, run_dir_problems
from megalite.config.user_files import as_record, read_json
from megalite.errors.problems import Problem, UserError, collect
from megalite.launch.context import ParallelContext
from megalite.launch.rendezvous import listed

_CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
SEEN_WITHIN_S = 65.0  # an NFS client may remember for 60 s (acdirmax) that a file was not there

_ANOTHER = "restore it from a copy, or set another run_dir"

T = TypeVar("T")


@dataclass(frozen=True)
class _Identity:
    """What run.json holds."""

    run_id: str
    data_fingerprint: str


@dataclass
class RunFolder:
    """A run folder that this job may write to. `changes` describes the settings that differ from the start before."""

    path: Path
    run_id: str
    fingerprint: str
    changes: list[str]
    lock: RunLock | None  # on rank 0
    created: list[Path] = field(default_factory=list)  # on rank 0: what `open` has made

    @classmethod
    def open(
        cls, path: Path, context: ParallelContext, resume: str, config: Mapping[str, Any], fingerprint: str
    ) -> "RunFolder":
        """Lock the folder for a new run or the one it holds; collective. UserError on all ranks where that cannot be.

        `config` is the resolved configuration as plain dictionaries; `fingerprint` identifies data and tokenizer.
        """
        opened = _by_rank_0(context, lambda: _open(path, resume, config, fingerprint))
        try:
            _refuse_disks_of_their_own(path, opened, context)
            run_id, changes = context.broadcast_object([opened.run_id, opened.changes] if opened else None)
        except BaseException:
            if opened is not None:
                opened.withdraw()
            raise
        return opened or cls(path, run_id, fingerprint, changes, None)

    def begin(self, context: ParallelContext, config: Mapping[str, Any]) -> None:
        """Write run.json and config.yaml; collective. Until then nothing in the folder has changed."""
        _by_rank_0(context, lambda: self._fill(config))

    def _fill(self, config: Mapping[str, Any]) -> None:
        run = {"run_id": self.run_id, "data_fingerprint": self.fingerprint}
        try:
            _write_if_new(self.path / RUN, json.dumps(run, indent=1) + "\n")  # first: it makes the folder a run's
            _write_if_new(self.path / _CONFIG, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
            self.checkpoints.mkdir(exist_ok=True)
            sync_folder(self.path.parent)
        except OSError as error:
            raise UserError(_not_usable(self.path, "written", error)) from error

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def labels(self) -> dict[str, str]:
        """What the manifest of a checkpoint records about its origin."""
        return {"run_id": self.run_id, "data_fingerprint": self.fingerprint}

    def refuse_another_s(self, checkpoint: Path, about: Mapping[str, Any]) -> None:
        """UserError where the manifest of a checkpoint names another run: somebody has put it into this folder."""
        origin = about.get("run_id", self.run_id)
        if origin != self.run_id:
            rule = f"it is of run {origin}, and the folder is that of run {self.run_id}"
            remedy = "take it out of this folder; to continue its run, copy the whole run folder and set run_dir to it"
            raise UserError(Problem(str(checkpoint), "of another run", rule, remedy))

    def lost(self) -> str | None:
        """Why this job has lost the folder, None if it has not. Rank 0 asks before every commit."""
        return None if self.lock is None else self.lock.lost()

    def close(self) -> None:
        """Let the next job in."""
        if self.lock is not None:
            self.lock.release()

    def withdraw(self) -> None:
        """Undo what was made for a run that does not begin, and close the folder."""
        _remove(self.path, self.created)
        self.close()


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files that are made inside are for their user alone (0600, folders 0700). A umask other than the usual 022 was
    chosen by somebody and stays in force."""
    before = os.umask(0o077)
    if before != 0o022:
        os.umask(before)
    try:
        yield
    finally:
        os.umask(before)


def _by_rank_0(context: ParallelContext, action: Callable[[], T]) -> T | None:
    """The result of `action`, which rank 0 alone performs, or its UserError on all ranks."""
    problems: list[Problem] = []
    result = collect(action, problems) if context.rank == 0 else None
    context.agree(problems)
    return result


def _open(path: Path, resume: str, config: Mapping[str, Any], fingerprint: str) -> RunFolder:
    """Check the folder, lock it, and clear up after jobs that were killed."""
    try:
        run, changes = _examine(path, resume, config, fingerprint)
    except OSError as error:
        raise UserError(_not_usable(path, "read", error)) from error
    created: list[Path] = []
    lock: RunLock | None = None
    try:
        _make_folders(path, created)
        if not (path / LOCK).exists():
            created.append(path / LOCK)
        lock = RunLock.acquire(path / LOCK)
        recover(path / CHECKPOINTS)
    except LockHeldError as error:
        remedy = "wait for that job, stop it, or set another run_dir"
        raise UserError(Problem("run_dir", str(path), f"it is in use by {error}", remedy)) from None
    except OSError as error:
        if lock is not None:
            lock.release()
        _remove(path, created)
        raise UserError(_not_usable(path, "written", error)) from error
    run = run or {"run_id": secrets.token_hex(8), "data_fingerprint": fingerprint}
    return RunFolder(path, run["run_id"], run["data_fingerprint"], changes, lock, created)


def _refuse_disks_of_their_own(path: Path, opened: RunFolder | None, context: ParallelContext) -> None:
    """All ranks must find the lock that rank 0 has just written: else they would write checkpoints to other disks."""
    here = socket.gethostname()
    token, first = context.broadcast_object([opened.lock.token, here] if opened and opened.lock else None)
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := getattr(holder_of(path / LOCK), "token", None) == token) and time.monotonic() < deadline:
        time.sleep(0.5)
    context.barrier(patient=True)
    if blind := {rank: host[0] for rank, host in enumerate(context.gather_json([] if seen else [here])) if host}:
        where = ", ".join(sorted(set(blind.values()))[:8])
        rule = f"rank 0 on {first} has written there what rank {listed(list(blind))} on {where} does not find"
        remedy = "set run_dir to a folder on a disk that all nodes share, by the same path on each"
        raise UserError(Problem("run_dir", str(path), rule, remedy))


def _examine(
    path: Path, resume: str, config: Mapping[str, Any], fingerprint: str
) -> tuple[dict[str, str] | None, list[str]]:
    """The run that `path` holds and which settings have changed since; nothing is touched.

    The run is None where there is nothing to continue: no run, or one that was killed before its first checkpoint.
    """
    if problems := [*run_dir_problems(str(path), path)]:
        raise UserError(problems)
    run, steps = None, committed(path / CHECKPOINTS)
    if os.path.lexists(path / RUN):
        run = vars(as_record(_Identity, read_json(path / RUN, _ANOTHER), path / RUN, _ANOTHER))
    if resume == "never" and (run is not None or steps):
        rule = "the folder holds a run already, and resume=never was asked for"
        raise UserError(Problem("run_dir", str(path), rule, "set another run_dir, or resume=auto to continue that run"))
    if not steps:
        return None, []
    assert run is not None, "else the checkpoints would be somebody else's"
    problems, changes = compare(saved_config(path / CHECKPOINTS), config)
    if run["data_fingerprint"] != fingerprint:
        rule = (
            "data, tokenizer or the cut into samples are not those that the run was started with "
            f"(fingerprint {run['data_fingerprint']})"
        )
        remedy = "use the same data, tokenizer and train.seq_length, or set another run_dir for a new run"
        problems.append(Problem("data", fingerprint, rule, remedy))
    if problems:
        raise UserError(problems)
    return run, changes


def _not_usable(path: Path, verb: str, error: OSError) -> Problem:
    where = f" ({error.filename})" if error.filename and error.filename != str(path) else ""
    rule = f"it cannot be {verb}: {error.strerror}{where}"
    return Problem("run_dir", str(path), rule, "set run_dir to a folder where you may write, on a disk with room")


def _make_folders(path: Path, created: list[Path]) -> None:
    """`path` and its missing parents, each noted in `created` as it is made, outermost first."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir()
            created.append(folder)


def _write_if_new(path: Path, content: str) -> None:
    if not path.is_file() or path.read_bytes() != content.encode():
        replace_synced(path, content.encode())


def _remove(path: Path, created: list[Path]) -> None:
    """Undo a start that failed half-way: delete what it created, but no folder that holds anything else by now."""
    if path in created:
        for name in (RUN, _CONFIG, LOCK):
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (path / CHECKPOINTS).rmdir()
    for item in reversed(created):
        with contextlib.suppress(OSError):
            item.unlink() if item.name == LOCK else os.rmdir(item)
