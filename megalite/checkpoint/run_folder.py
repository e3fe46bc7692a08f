"""Opens the folder of a run: for one job at a time, and only for a run that may go on in it.

    run.json       what stays the same over all continuations: the run's id and the fingerprint of its data
    config.yaml    the resolved settings of the latest start
    lock           the job that runs now
    tokenizer/     what its token ids mean, as transformers reads it; every checkpoint holds the hash of each file
    checkpoints/   see commit.py

Rank 0 alone decides by what is on disk, since others may see it late on NFS. A start that is refused leaves nothing
behind.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml  # type: ignore[import-untyped]

from megalite.checkpoint.commit import CHECKPOINTS, committed, recover, step_of
from megalite.checkpoint.manifest import digest
from megalite.checkpoint.reading import Found, inspect
from megalite.config.files import (
    LOCK,
    OWN,
    RUN,
    open_to_append,
    read_bytes,
    read_object,
    run_dir_problems,
    sync_folder,
    write_atomically,
)
from megalite.config.settings import leaves, yaml_value
from megalite.errors.problems import Problem, UserError, plain, refuse
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast

if TYPE_CHECKING:
    from megalite.checkpoint.remote import Remote

TOKENIZER = "tokenizer"
SEEN_WITHIN_S = 65.0  # an NFS client may remember for 60 s (acdirmax) that a file was not there

# What may change between a run and its continuation. A change is refused if it makes the saved tensors meaningless or
# reorders the data. The sequence length may grow, and rotary positions with it. Everything else may change on purpose.
_LENGTH = "train.seq_length"
OF_STATE = ("optimizer.name", "optimizer.moment_dtype", "optimizer.muon.router")  # what is in its state
_FIXED = ("seed", "data.validation_fraction", "data.weights", *OF_STATE, "model.")
_FREE = (  # beginnings of names; the model's leave the meaning of its parameters alone
    *("model.name", "model.dropout", "model.attention_dropout", "model.embedding_dropout", "model.init_std"),
    "model.mup_base_",
    *("model.loss_chunk_tokens", "model.moe.aux_loss", "model.moe.z_loss_coeff", "model.moe.expert_bias_rate"),
    *("model.moe.capacity_factor", "model.moe.dispatcher"),
)
_WITH_LENGTH = (_LENGTH, "model.rope_")  # may change where the sequence length grows
_OF_A_START = (
    *("run_dir", "run_name", "resume", "checkpoint.init_from", "checkpoint.branch_from"),
    *("launch.preflight", "launch.status_file", "train.max_minutes"),
)


SettingsAt = Callable[[int], Mapping[str, Any]]


def take_lock(path: Path) -> tuple[TextIO, dict[str, Any]]:
    """The open file at `path` with the kernel's lock, which ends with the process, killed or not, and the job that it
    now names. UserError where a live job has it, OSError where it cannot be written.

    Where the file system has no such locks, the job that started last has it: the other one finds its folder `lost`.
    """
    file = open_to_append(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        known = ", ".join(f"{name} {value}" for name, value in holder_of(path).items() if value)
        remedy = "wait for that job, stop it, or set another run_dir"
        problem = Problem("run_dir", str(path.parent), f"it is in use by another job: {known}", remedy)
        raise UserError(problem) from None
    except OSError:
        pass
    started, job = time.strftime("%Y-%m-%d %H:%M:%S %z"), os.environ.get("SLURM_JOB_ID")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "job": job}
    file.truncate(0)
    file.write(json.dumps(holder) + "\n")
    os.fsync(file.fileno())
    return file, holder


def holder_of(path: Path) -> dict[str, Any]:
    """The holder that the lock file names; nothing where it cannot be read, was released, or is torn."""
    with contextlib.suppress(UserError):
        return read_object(path)  # opened anew, so that NFS asks the server
    return {}


class RunFolder:
    """A run folder that this job may write to. `changes` describes the settings that differ from the start before."""

    def __init__(
        self,
        path: Path,
        context: ParallelContext,
        resume: str,
        settings: SettingsAt,
        fingerprint: str,
        remote: "Remote | None" = None,
    ) -> None:
        """Lock the folder for a new run or the one that it, or the `remote` store, holds; collective. UserError on all
        ranks where that cannot be. `settings`: the resolved ones in which a step is done, as plain dictionaries.
        `fingerprint`: of data and tokenizer of the run's first phase, empty where these are not needed any more."""
        self.path, self.checkpoints, self._remote = path, path / CHECKPOINTS, remote
        self.lock: TextIO | None = None  # on rank 0
        self._new: list[Path] = []  # what was not there before this start, on rank 0: innermost first
        try:
            opened = rank0_broadcast(context, lambda: self._open(resume, settings, fingerprint))
            self.run_id, fingerprint, self.changes, self.holder = opened
            all_ranks_or_raise(context, self._find, patient=True)
        except BaseException:
            self.withdraw()
            raise
        self.labels = {"run_id": self.run_id, "data_fingerprint": fingerprint}  # for run.json and manifests

    def _open(self, resume: str, settings: SettingsAt, fingerprint: str) -> tuple[str, str, list[str], dict[str, Any]]:
        """Check the folder, lock it, and clear up after killed jobs: the run's id and fingerprint, its changes, and the
        lock's holder."""
        with _usable(self.path):
            run_id, fingerprint, changes = self._examine(resume, settings, fingerprint)
            names = (LOCK,) if (self.path / RUN).exists() else OWN
            places = (*(self.path / name for name in names), self.path, *self.path.parents)
            self._new = [place for place in places if not os.path.lexists(place)]
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self.lock, self.holder = take_lock(self.path / LOCK)
            except UserError:  # another job has it, and what has appeared since is that job's
                self._new = []
                raise
            recover(self.checkpoints)
            if run_id and not (self.path / RUN).exists():  # a run of the store, which goes on here: what comes stays
                self._new = []
                self._write_labels(run_id, fingerprint)
        return run_id or secrets.token_hex(8), fingerprint, changes, self.holder

    def _write_labels(self, run_id: str, fingerprint: str) -> None:
        labels = {"run_id": run_id, "data_fingerprint": fingerprint}
        write_atomically(self.path / RUN, (json.dumps(labels, indent=1) + "\n").encode())  # the folder is a run's now

    def _examine(self, resume: str, settings: SettingsAt, fingerprint: str) -> tuple[str, str, list[str]]:
        """Id and fingerprint of the run that the folder holds and which settings have changed since; nothing is
        touched. The id is empty where there is nothing to continue: no run, or one that was killed before its first
        checkpoint."""
        refuse([*run_dir_problems(str(self.path), self.path)])
        run = read_object(self.path / RUN) if (self.path / RUN).exists() else {}
        if run and resume == "never":
            rule, remedy = "the folder holds a run already", "set another run_dir, or resume=auto to continue that run"
            raise UserError(Problem("run_dir", str(self.path), f"{rule}, and resume=never was asked for", remedy))
        checkpoints = [checkpoint for _, checkpoint in committed(self.checkpoints)]
        run = run if checkpoints else {}
        newest_step = step_of(checkpoints[0]) if checkpoints else -1
        there = None if self._remote is None else self._remote.newest(newest_step, run.get("run_id"))
        if there is not None:
            if resume == "never":
                rule, remedy = "a run is saved there, and resume=never was asked for", "another prefix, or resume=auto"
                raise UserError(Problem("checkpoint.remote", settings(0)["checkpoint"]["remote"], rule, remedy))
            run = there.manifest.about
        elif not checkpoints:
            return "", fingerprint, []
        # Before all ranks verify the checkpoints: the newest whose JSON is intact says what the run was started with.
        looked_at = (inspect(checkpoint, ParallelContext(), json_only=True) for checkpoint in checkpoints)
        found = there or next((found for found in looked_at if isinstance(found, Found)), None)
        problems, changes = compare(found.state["config"], settings(found.manifest.step)) if found else ([], [])
        if fingerprint not in ("", before := run.get("data_fingerprint")):
            rule = f"data or tokenizer differ from the run's (fingerprint {before})"
            remedy = "use those of the run, or another run_dir for a new run"
            problems.append(Problem("data", fingerprint, rule, remedy))
        refuse(problems)
        return str(run.get("run_id", "")), fingerprint or str(before), changes

    def _find(self) -> None:
        """UserError unless this rank sees the lock that rank 0 has taken: else it would write checkpoints elsewhere."""
        deadline, here = time.monotonic() + SEEN_WITHIN_S, socket.gethostname()
        while holder_of(self.path / LOCK) != self.holder:
            if time.monotonic() > deadline:
                rule = f"rank 0 on {self.holder['host']} has written its lock there, and {here} does not find it"
                remedy = "set run_dir to a folder on a disk that all nodes share, by the same path on each"
                raise UserError(Problem("run_dir", str(self.path), rule, remedy))
            time.sleep(0.5)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write run.json and config.yaml, on rank 0. Until then nothing in the folder has changed."""
        with _usable(self.path):
            self._write_labels(*self.labels.values())
            settings = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            write_atomically(self.path / "config.yaml", settings.encode())
            self.checkpoints.mkdir(exist_ok=True)
            sync_folder(self.path.parent)

    def lost(self) -> str | None:
        """Why the lock no longer names this job, None if it does. Rank 0 asks before every commit."""
        is_ours = self.lock is None or holder_of(self.path / LOCK) == self.holder
        return None if is_ours else f"the run folder {self.path} was taken over by another job, or was moved"

    def close(self) -> None:
        """Let the next job in. The lock stays as an empty file: deleting it would race with that job's opening it."""
        if self.lock is not None:
            with contextlib.suppress(OSError):  # the run is over, whatever its disk says
                if self.lost() is None:
                    self.lock.truncate(0)
                self.lock.close()

    def withdraw(self) -> None:
        """Undo what was made for a run that does not begin, and close the folder."""
        for path in self._new:
            with contextlib.suppress(OSError):  # it is not there, or holds something else by now
                if path.is_dir():
                    shutil.rmtree(path) if path.parent == self.path else path.rmdir()
                else:
                    path.unlink()
        self.close()


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """All refused differences, and the allowed ones in words. Settings that only one side knows are passed over."""
    before, now, problems, changes = leaves(saved), leaves(current), list[Problem](), list[str]()
    grows = before.get(_LENGTH, 0) < now.get(_LENGTH, 0)
    changed = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    for name in sorted(changed.difference(_OF_A_START)):
        free = (*_FREE, *OF_STATE) if current["optimizer"]["may_change"] else _FREE
        fixed = name.startswith(_FIXED) and not name.startswith(free)
        if not grows if name.startswith(_WITH_LENGTH) else fixed:
            rule = f"the run in this folder was started with {name}={plain(before[name])}"
            anew = "optimizer.may_change=true to begin its state anew, " if name in OF_STATE else ""
            remedy = f"set {name}={yaml_value(before[name])}, {anew}or another run_dir for a new run"
            problems.append(Problem(name, now[name], rule, remedy))
        else:
            changes.append(f"{name} is now {plain(now[name])}; the run was at {plain(before[name])}")
    return problems, changes


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """An OSError inside is a UserError that says so of the run folder."""
    try:
        yield
    except OSError as error:
        remedy = "set run_dir to a folder where you may write, on a disk with room"
        raise UserError(Problem("run_dir", str(path), f"it cannot be used: {error}", remedy)) from error


def require_room(folder: Path, size: int) -> None:
    """UserError if the disk of a run's checkpoints has no room for one of `size` bytes."""
    usage = shutil.disk_usage(folder if folder.exists() else folder.parent)
    if usage.free < size and usage.total:  # some network disks do not tell
        rule = f"a checkpoint needs about {size / 2**20:,.1f} MiB, {usage.free / 2**20:,.1f} MiB are free"
        remedy = "make room, or use a folder on another disk (to continue a run there, move all of its folder)"
        raise UserError(Problem("run_dir", str(folder.parent), rule, remedy))


def keep_tokenizer(run_dir: Path, files: Mapping[str, bytes], known: Mapping[str, str]) -> dict[str, str]:
    """Write the files unless they are there and as they should be; the hash of each. `known`: the hashes in the
    checkpoint from which the run continues, whose files another version of a library may have written."""
    hashes = {name: digest(content) for name, content in files.items()}
    with contextlib.suppress(UserError):
        check_tokenizer(run_dir, known or hashes)
        return dict(known or hashes)
    with _usable(run_dir):
        (run_dir / TOKENIZER).mkdir(exist_ok=True)
        for name, content in files.items():
            write_atomically(run_dir / TOKENIZER / name, content)
    return hashes


def check_tokenizer(run_dir: Path, known: Mapping[str, str]) -> None:
    """UserError unless every file has the hash that the checkpoint holds."""
    remedy = "start the run again, which writes it anew, or copy it from the run's first place"
    for name, expected in known.items():
        path = run_dir / TOKENIZER / name
        if digest(read_bytes(path, remedy)) != expected:
            raise UserError(Problem(TOKENIZER, str(path), "is not what the run has written", remedy))
