"""The folder of a run: whose it is, who may write to it now, and whether this run may go on in it.

    run.json       what stays the same over all continuations: the run's id and the fingerprint of its data
    config.yaml    the resolved settings of the latest start
    lock           the job that runs now
    checkpoints/   see commit.py

Rank 0 alone looks at the file system (others may see it late on NFS) and tells the rest. A start that is refused leaves
nothing behind.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megalite.checkpoint.commit import committed, recover, replace_synced, sync_folder
from megalite.checkpoint.lock import LockHeldError, RunLock
from megalite.checkpoint.resume_rules import compare
from megalite.config.problems import Problem, UserError
from megalite.parallel.context import ParallelContext

_RUN, _CONFIG, _LOCK = "run.json", "config.yaml", "lock"
CHECKPOINTS = "checkpoints"


@dataclass
class RunFolder:
    """A run folder that this job may write to. `changes`: settings that differ from the start before, in words."""

    path: Path
    run_id: str
    fingerprint: str
    changes: list[str]
    lock: RunLock | None  # on rank 0

    @classmethod
    def open(
        cls, path: Path, context: ParallelContext, resume: str, config: Mapping[str, Any], fingerprint: str
    ) -> "RunFolder":
        """Create or continue the run in `path`; collective. UserError, the same on all ranks, where that cannot be.

        `config` is the resolved configuration as plain dictionaries; `fingerprint` identifies data and tokenizer.
        """
        opened: RunFolder | None = None
        problems: list[Problem] = []
        if context.rank == 0:
            try:
                opened = _open(path, resume, config, fingerprint)
            except UserError as error:
                problems = error.problems
        context.agree(problems)
        said = context.broadcast_object({"run_id": opened.run_id, "changes": opened.changes} if opened else None)
        return opened or cls(path, said["run_id"], fingerprint, said["changes"], None)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def labels(self) -> dict[str, str]:
        """What the manifest of a checkpoint says about its origin."""
        return {"run_id": self.run_id, "data_fingerprint": self.fingerprint}

    def owned(self) -> bool:
        """Whether this job still has the folder to itself. Asked before every commit, on rank 0."""
        return self.lock is None or self.lock.held()

    def close(self) -> None:
        """Let the next job in."""
        if self.lock is not None:
            self.lock.release()


def _open(path: Path, resume: str, config: Mapping[str, Any], fingerprint: str) -> RunFolder:
    """Rank 0: look first, then lock, then write."""
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
        run = run or {"run_id": secrets.token_hex(8), "data_fingerprint": fingerprint}
        (path / CHECKPOINTS).mkdir(exist_ok=True)
        recover(path / CHECKPOINTS)
        _write_if_new(path / _CONFIG, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
        _write_if_new(path / _RUN, json.dumps(run, indent=1) + "\n")  # last: it makes the folder a run
        sync_folder(path.parent)
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
    return RunFolder(path, run["run_id"], run["data_fingerprint"], changes, lock)


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
