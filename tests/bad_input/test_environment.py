"""What is wrong around the program: its variables, its neighbours, its folders, its versions.

What takes several ranks to go wrong takes real ranks here, too: the launcher's `main` in forked processes that meet at
a port as those of a cluster do.
"""

import contextlib
import errno
import io
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megalite.checkpoint.run_folder import holder_of, take_lock
from megalite.commands import train
from megalite.launch.context import ParallelContext
from tests.bad_input.launching import SMALL, TOKENS, Row, Scene, check, free_port, tree, write_corpus
from tests.ranks import run_ranks

RENDEZVOUS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def port_in_use(scene: Scene) -> None:
    taken = scene.until_the_end.enter_context(socket.socket())
    taken.bind(("", 0))
    taken.listen()
    scene.patch.setenv("MASTER_PORT", str(taken.getsockname()[1]))


def live_job(scene: Scene) -> None:
    (scene.folder / "run").mkdir()
    lock, _ = take_lock(scene.folder / "run" / "lock")
    scene.until_the_end.enter_context(lock)


def not_writable(scene: Scene) -> None:
    """For root, under whom these tests may run, there is no such folder."""

    def refuse(**_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    scene.patch.setattr("tempfile.mkdtemp", refuse)


def full_disk(scene: Scene) -> None:
    scene.patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=2**40, free=1024))


def old_torch(scene: Scene) -> None:
    scene.patch.setattr("megalite.config.machine_rules.version", lambda package: {"torch": "2.9.1+cu128"}[package])


ROWS = [
    Row(
        "a number of ranks and no rank",
        "",
        ["RANK=null: must be a whole number from 0 to ", "torchrun --nproc-per-node N", "unset RANK, WORLD_SIZE"],
        variables={"WORLD_SIZE": "2", **RENDEZVOUS},
    ),
    Row(
        "no place to meet",
        "",
        [
            "2 problems",
            "MASTER_ADDR=null: must be the host of rank 0",
            "torchrun",
            "MASTER_PORT=null: must be a whole number",
        ],
        variables={"RANK": "0", "WORLD_SIZE": "2"},
    ),
    Row(
        "a time that is no number",
        "",
        ["1 problem", "MEGALITE_JOB_BEGAN='today': must be a whole number from 0 to ", "date +%s"],
        variables={"MEGALITE_JOB_BEGAN": "today"},
    ),
    Row(
        "a rank beyond the number of ranks",
        "",
        ["RANK='2': must be a whole number from 0 to 1", "torchrun"],
        variables={"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "2", **RENDEZVOUS},
    ),
    Row(
        "a port that another program has",
        "",
        [
            "MASTER_ADDR:MASTER_PORT='localhost:",
            "the port is in use on this host",
            "another MASTER_PORT",
            "--master-port",
        ],
        port_in_use,
        variables={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
    ),
    Row(
        "peers that never come",
        "parallel.startup_timeout_s=0.2 parallel.tp=1 train.global_batch_size=6",
        ["WORLD_SIZE=3: 1 of 3 ranks arrived within parallel.startup_timeout_s; missing: 1, 2", "logs of the missing"],
        ranks=3,
    ),
    Row(
        "rank 0 that never comes",
        "parallel.startup_timeout_s=0.2",
        ["MASTER_ADDR:MASTER_PORT='localhost:1'", "rank 1 found nobody there: ", "no firewall closes"],
        variables={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    ),
    Row("no CUDA", "device=cuda", ["device='cuda'", "no usable CUDA device", "device=cpu"]),
    Row(
        "run_dir may not be written",
        "run_dir=new/run",
        ["run_dir='new/run'", "cannot be written: Permission denied", "where you may write"],
        not_writable,
    ),
    Row(
        "a disk without room for a checkpoint",
        "run_dir=run",
        ["run_dir='", "/run': a checkpoint needs about", "MiB, 0.0 MiB are free", "make room", "another disk"],
        full_disk,
    ),
    Row(
        "a run_dir that a live job writes to",
        "run_dir=run",
        [
            f"it is in use by another job: host {socket.gethostname()}, pid {os.getpid()}, started 20",
            "stop it, or set another run_dir",
        ],
        live_job,
    ),
    Row("an old torch", "", ["torch='2.9.1+cu128': older than 2.11", "CVE-2026-24747", "pip install"], old_torch),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_environment_is_refused(row: Row, scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    scene.patch.setattr(train, "WAIT_FOR_RANK_ZERO_S", 0.0)
    check(row, scene, capfd, SMALL)


# --- what takes several ranks ----------------------------------------------------------------------------------------

Spoil = Callable[[pytest.MonkeyPatch, bool], list[str]]  # whether this rank is the last; its own overrides


@dataclass(frozen=True)
class OfRanks:
    """Something that is wrong on the last of some ranks, or between them. `spoil` brings it about on every rank."""

    what: str
    words: list[str]
    spoil: Spoil
    argv: str = ""
    ranks: int = 2
    messages: int = 1

    def __str__(self) -> str:
        return self.what


def claim_the_rank_of_another(patch: pytest.MonkeyPatch, last: bool) -> list[str]:
    if last:
        patch.setenv("RANK", "1")
    return []


def other_settings(patch: pytest.MonkeyPatch, last: bool) -> list[str]:
    """A cache may be a machine's own."""
    return ["optimizer.lr=0.5", "seed=1", "run_dir=elsewhere", "data.cache_dir=cache"] if last else []


def other_code(patch: pytest.MonkeyPatch, last: bool) -> list[str]:
    """And another torch."""
    if last:
        patch.setattr(torch, "__version__", "2.12.1")
        patch.setattr("megalite.launch.startup.CODE", Path(__file__).parent)
    return []


def other_processors(patch: pytest.MonkeyPatch, last: bool) -> list[str]:
    patch.setattr("megalite.launch.device._has_fast_bf16", lambda device: last)
    return []


def fewer_gpus_than_ranks(patch: pytest.MonkeyPatch, last: bool) -> list[str]:
    patch.setattr("megalite.launch.startup.gpu_id", lambda device: "GPU-0")
    return []


def disk_of_its_own(patch: pytest.MonkeyPatch, last: bool) -> list[str]:
    """On which a copy of the run lies that was made before this start."""
    if last:
        folder = Path(tempfile.mkdtemp())
        (folder / "lock").touch()
        patch.setattr("megalite.checkpoint.run_folder.SEEN_WITHIN_S", 0.2)
        patch.setattr("megalite.checkpoint.run_folder.holder_of", lambda path: holder_of(folder / "lock"))
    return []


HOST = socket.gethostname()
ROWS_OF_RANKS = [
    OfRanks(
        "two processes of one rank",
        ["RANK=1: process ", f" on {HOST} and process ", "both claim this rank", "its own MASTER_PORT"],
        claim_the_rank_of_another,
        argv="train.global_batch_size=6",
        ranks=3,
        messages=2,
    ),
    OfRanks(
        "other settings on a rank",
        [
            *(
                "4 problems",
                f"seed='default': so on rank 0 ({HOST}), but '1' on rank 1",
                "optimizer.lr='default': so on rank 0",
            ),
            *("but '0.5' on rank 1", "run_dir='", "/elsewhere' on rank 1", "the same settings"),
        ],
        other_settings,
    ),
    OfRanks(
        "other code and another torch on a rank",
        ["2 problems", "megalite='code with fingerprint ", f"torch='{torch.__version__}': so on rank 0", "on rank 1"],
        other_code,
    ),
    OfRanks(
        "processors that make auto another precision",
        ["1 problem", f"precision='fp32': so on rank 0 ({HOST}), but 'bf16' on rank 1"],
        other_processors,
        argv="precision=auto",
    ),
    OfRanks(
        "more ranks than GPUs",
        [f"device='cuda': ranks 0, 1 of {HOST} share one GPU", "at most one rank per GPU"],
        fewer_gpus_than_ranks,
    ),
    OfRanks(
        "a run_dir that is not shared",
        ["run_dir='", f"rank 0 on {HOST} has written its lock there, and {HOST} does not find it", "all nodes share"],
        disk_of_its_own,
    ),
]


def launched_rank(context: ParallelContext, row: OfRanks, port: int, folder: Path) -> tuple[int, str]:
    """Status and message of the launcher as one rank of a job."""
    context.close()
    os.chdir(folder)
    last, said = context.rank == row.ranks - 1, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        for name, value in {"RANK": context.rank, "WORLD_SIZE": row.ranks, "LOCAL_RANK": context.rank}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "localhost")
        patch.setenv("MASTER_PORT", str(port))
        patch.setattr(train, "WAIT_FOR_RANK_ZERO_S", 0.0)
        own = row.spoil(patch, last)
        status = pretrain_gpt.main([*SMALL, *TOKENS, *row.argv.split(), *own])
    return status, said.getvalue()


@pytest.mark.parametrize("row", ROWS_OF_RANKS, ids=str)
def test_what_is_wrong_between_ranks_is_said_once_and_ends_them_all(row: OfRanks, launch_folder: Path) -> None:
    write_corpus(launch_folder)
    before = tree(launch_folder)
    outcomes = run_ranks(launched_rank, row.ranks, row, free_port(), launch_folder)
    message = "".join(said for _, said in outcomes)
    assert [status for status, _ in outcomes] == [2] * row.ranks, message
    assert message.count("megalite: refused") == row.messages, message
    assert "Traceback" not in message
    missing = [word for word in row.words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert tree(launch_folder) == before
