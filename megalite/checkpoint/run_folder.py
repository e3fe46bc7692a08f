"""The folder of a run: whose it is, who may write to it now, and whether this run may go on in it.

    run.json       what stays the same over all continuations: the run's id and the fingerprint of its data
    config.yaml    the resolved settings of the latest start
    lock           the job that runs now
    checkpoints/   see commit.py

Rank 0 alone decides by what is on disk (others may see it late on NFS) and tells the rest; they only make sure that it
is one disk for all. A start that is refused leaves nothing behind.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from megalite.checkpoint.commit import committed, recover, replace_synced, sync_folder
from megalite.checkpoint.lock import LockHeldError, RunLock, holder_of
from megalite.checkpoint.resume_rules import compare
from megalite.config.problems import Problem, UserError, collect
from megalite.parallel.context import ParallelContext
from megalite.parallel.meeting import listed

_RUN, _CONFIG, _LOCK = "run.json", "config.yaml", "lock"
CHECKPOINTS = "checkpoints"
SEEN_WITHIN_S = 65.0  # an NFS client may remember for 60 s (acdirmax) that a file was not there

T = TypeVar("T")


@dataclass
class RunFolder:
    """A run folder that this job may write to. `changes`: settings that differ from the start before, in words."""

    path: Path
    run_id: str
    fingerprint: str
    changes: list[str]
    lock: RunLock | None  # on rank 0
    created: list[Path] = field(default_factory=list)  # on rank 0, what is there for the lock's sake alone

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
            said = context.broadcast_object([opened.run_id, opened.changes] if opened else None)
        except BaseException:
            if opened is not None:
                opened.withdraw()
            raise
        return opened or cls(path, said[0], fingerprint, said[1], None)

    def begin(self, context: ParallelContext, config: Mapping[str, Any]) -> None:
        """Write what a run folder holds from its start on; collective. Until then nothing in it has changed."""
        _by_rank_0(context, lambda: self._fill(config))

    def _fill(self, config: Mapping[str, Any]) -> None:
        run = {"run_id": self.run_id, "data_fingerprint": self.fingerprint}
        try:
            self.checkpoints.mkdir(exist_ok=True)
            _write_if_new(self.path / _CONFIG, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
            _write_if_new(self.path / _RUN, json.dumps(run, indent=1) + "\n")  # last: it makes the folder a run
            sync_folder(self.path.parent)
        except OSError as error:
            raise UserError(_not_usable(self.path, "written", error)) from error

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def labels(self) -> dict[str, str]:
        """What the manifest of a checkpoint says about its origin."""
        return {"run_id": self.run_id, "data_fingerprint": self.fingerprint}

    def refuse_another_s(self, checkpoint: Path, about: Mapping[str, Any]) -> None:
        """UserError where a checkpoint of this folder is, by its own words, of another run: somebody put it there."""
        origin = about.get("run_id", self.run_id)
        if origin != self.run_id:
            rule = f"it is of run {origin}, and the folder is that of run {self.run_id}"
            remedy = "take it out of this folder; to continue its run, copy the whole run folder and set run_dir to it"
            raise UserError(Problem(str(checkpoint), "of another run", rule, remedy))

    def owned(self) -> bool:
        """Whether this job still has the folder to itself. Asked before every commit, on rank 0."""
        return self.lock is None or self.lock.held()

    def close(self) -> None:
        """Let the next job in."""
        if self.lock is not None:
            self.lock.release()

    def withdraw(self) -> None:
        """Undo what was made for a run that does not begin, and close the folder."""
        _remove(self.path, self.created)
        self.close()


def _by_rank_0(context: ParallelContext, action: Callable[[], T]) -> T | None:
    """The result of `action`, which rank 0 alone performs, or its UserError on all ranks."""
    problems: list[Problem] = []
    result = collect(action, problems) if context.rank == 0 else None
    context.agree(problems)
    return result


def _open(path: Path, resume: str, config: Mapping[str, Any], fingerprint: str) -> RunFolder:
    """Judge first, then lock, then clear up after those that were killed."""
    try:
        run, changes = _examine(path, resume, config, fingerprint)
    except OSError as error:
        raise UserError(_not_usable(path, "read", error)) from error
    created: list[Path] = []
    lock: RunLock | None = None
    try:
        _make_folders(path, created)
        if not (path / _LOCK).exists():
            created.append(path / _LOCK)
        lock = RunLock.acquire(path / _LOCK)
        recover(path / CHECKPOINTS)
    except LockHeldError as error:
        rule = f"it is in use by {error}"
        raise UserError(
            Problem("run_dir", str(path), rule, "wait for that job, stop it, or set another run_dir")
        ) from None
    except OSError as error:
        if lock is not None:
            lock.release()
        _remove(path, created)
        raise UserError(_not_usable(path, "written", error)) from error
    run = run or {"run_id": secrets.token_hex(8), "data_fingerprint": fingerprint}
    return RunFolder(path, run["run_id"], run["data_fingerprint"], changes, lock, created)


def _refuse_disks_of_their_own(path: Path, opened: RunFolder | None, context: ParallelContext) -> None:
    """All ranks must find the lock that rank 0 has just written: else their part of each checkpoint lies elsewhere."""
    here = socket.gethostname()
    token, first = context.broadcast_object([opened.lock.token, here] if opened and opened.lock else None)
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := _finds(path / _LOCK, token)) and time.monotonic() < deadline:
        time.sleep(0.5)
    context.barrier(patient=True)
    blind = {rank: host[0] for rank, host in enumerate(context.gather_json([] if seen else [here])) if host}
    if blind:
        where = ", ".join(sorted(set(blind.values()))[:8])
        rule = f"rank 0 on {first} has written there what rank {listed(list(blind))} on {where} does not find"
        remedy = "set run_dir to a folder on a disk that all nodes share, by the same path on each"
        raise UserError(Problem("run_dir", str(path), rule, remedy))


def _finds(lock: Path, token: str) -> bool:
    holder = holder_of(lock)
    return holder is not None and holder.token == token


def _examine(
    path: Path, resume: str, config: Mapping[str, Any], fingerprint: str
) -> tuple[dict[str, str] | None, list[str]]:
    """The run that `path` holds and what has changed since, without touching anything.

    None where there is nothing to continue: no run, or one that was killed before its first checkpoint.
    """
    if path.exists() and not path.is_dir():
        raise UserError(Problem("run_dir", str(path), "it is a file", "set run_dir to a folder, or to a new path"))
    run, steps = _read_run(path), committed(path / CHECKPOINTS)
    if resume == "never" and (run is not None or steps):
        rule = "the folder holds a run already, and resume=never was asked for"
        raise UserError(Problem("run_dir", str(path), rule, "set another run_dir, or resume=auto to continue that run"))
    if not steps:
        return None, []
    if run is None or not (path / _CONFIG).is_file():
        rule = f"it holds checkpoints, but not the {_RUN} and {_CONFIG} that say what run they are of"
        remedy = "copy the whole run folder, or set another run_dir"
        raise UserError(Problem("run_dir", str(path), rule, remedy))
    problems, changes = compare(_read_config(path), config)
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


def _read_run(path: Path) -> dict[str, str] | None:
    try:
        run = json.loads((path / _RUN).read_text())
        return {"run_id": str(run["run_id"]), "data_fingerprint": str(run["data_fingerprint"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(_damaged(path / _RUN)) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((path / _CONFIG).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(_damaged(path / _CONFIG)) from error
    if not isinstance(config, dict):
        raise UserError(_damaged(path / _CONFIG))
    return config


def _damaged(path: Path) -> Problem:
    return Problem(str(path), "damaged", "it cannot be read", "restore it from a copy, or set another run_dir")


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
    if not path.is_file() or path.read_text() != content:
        replace_synced(path, content.encode())


def _remove(path: Path, created: list[Path]) -> None:
    """Undo a start that failed half-way: what it created, as far as it is empty of anything else."""
    if path in created:
        for name in (_RUN, _CONFIG, _LOCK):
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (path / CHECKPOINTS).rmdir()
    for item in reversed(created):
        with contextlib.suppress(OSError):
            item.unlink() if item.name == _LOCK else os.rmdir(item)
