"""The commit: everything on disk before the name appears; a failed save changes nothing; old ones go last."""

import itertools
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import commit
from megalite.checkpoint.commit import committed, recover
from megalite.checkpoint.manifest import Piece
from megalite.checkpoint.reading import newest
from megalite.checkpoint.store import CheckpointError, save
from megalite.launch.context import ParallelContext
from tests.checkpoint.samples import SINGLE, cut, files_below, no_report, values, whole
from tests.ranks import run_ranks


def save_plain(folder: Path, step: int, keep: int = 2, good_before: int = 0) -> None:
    save(folder, step, whole(values(step)), {"step": step}, SINGLE, keep=keep, good_before=good_before)


def newest_step(folder: Path) -> int:
    found = newest(folder, SINGLE, no_report)
    assert found is not None
    return found.manifest.step


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Every fsync (with the file's size at that moment) and rename from here on, in order: (call, path, size)."""
    calls: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))
        fsync(descriptor)

    def recorded_rename(source: str | Path, target: str | Path) -> None:
        calls.append(("rename", f"{source} {target}", 0))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    return calls


def test_a_power_cut_finds_all_bytes_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of syncs: data whole < manifest < temporary folder < rename < parent folder < deletion of old ones."""
    save_plain(tmp_path, 1, keep=1)
    calls = record_calls(monkeypatch)
    save_plain(tmp_path, 2, keep=1)
    monkeypatch.undo()
    (at_commit,) = [
        at for at, (call, paths, _) in enumerate(calls) if call == "rename" and paths.endswith("/step-00000002")
    ]
    temporary = calls[at_commit][1].split()[0]
    synced = {path: (at, size) for at, (call, path, size) in enumerate(calls) if call == "fsync"}
    manifest = synced[f"{temporary}/manifest.json"][0]
    for file in (tmp_path / "step-00000002").iterdir():
        at, size = synced[f"{temporary}/{file.name}"]
        assert size == file.stat().st_size, f"{file.name} was synced before its last byte was written"
        assert at <= manifest
    assert manifest < synced[temporary][0] < at_commit < synced[str(tmp_path)][0]
    deletions = [at for at, (call, paths, _) in enumerate(calls) if call == "rename" and "/.trash-" in paths]
    assert len(deletions) == 1
    assert deletions[0] > synced[str(tmp_path)][0]


def test_the_newest_are_kept_and_the_rest_deleted(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_plain(tmp_path, step, keep=2)
        assert [at for at, _ in committed(tmp_path)] == [at for at in (step, step - 1) if at >= 1]
    save_plain(tmp_path, 6, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step-00000006"]


def test_a_checkpoint_on_another_disk_is_forgotten_not_deleted(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    save_plain(folder, 1)
    (folder / "step-00000001").rename(elsewhere)
    (folder / "step-00000001").symlink_to(elsewhere)
    before = files_below(elsewhere)
    save_plain(folder, 2, keep=1)
    assert os.listdir(folder) == ["step-00000002"]
    assert files_below(elsewhere) == before


def test_the_newest_good_one_is_kept_whatever_comes_after_it(tmp_path: Path) -> None:
    for step in range(1, 4):
        save_plain(tmp_path, step, keep=3)
    for step in range(4, 7):  # the weights of step 3, over and over
        save_plain(tmp_path, step, keep=1, good_before=3)
        assert [at for at, _ in committed(tmp_path)] == [step, 2]
    save_plain(tmp_path, 7, keep=2, good_before=7)
    assert [at for at, _ in committed(tmp_path)] == [7, 6]


@pytest.mark.parametrize("fails", ["shutil.rmtree", "megalite.checkpoint.commit.committed"])
def test_an_old_one_that_cannot_be_deleted_or_listed_does_not_fail_the_save(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_plain(tmp_path, 1, keep=1)

    def refuse(*_: object) -> None:
        raise OSError("busy")

    monkeypatch.setattr(fails, refuse)
    save_plain(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert newest_step(tmp_path) == 2
    save_plain(tmp_path, 3, keep=1)
    recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003"]


def test_a_complete_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    save_plain(tmp_path, 3)
    before = files_below(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 3 was not saved: .*Directory not empty"):
        save_plain(tmp_path, 3)
    assert files_below(tmp_path) == before


def test_leftovers_of_dead_attempts_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    save_plain(tmp_path, 1)
    for name in (".tmp-step-00000002-0123abcd", ".trash-step-00000000-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    others = [".tmp-mine", "notes", "step-00000002.bad-20250101-000000-ab", ".tmp-step-2-0123abcd"]
    for name in others:
        (tmp_path / name).mkdir()
    recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(["step-00000001", *others])


LIMIT = 200_000


def save_with_a_small_disk(context: ParallelContext, folder: Path, small: list[int]) -> list[str]:
    """Save on ranks of which some may only write small files; then all may, and it works."""
    big = [Piece(f"w{i}", (16, 8192), (context.rank * 8, 0), torch.zeros(8, 8192)) for i in range(4)]
    save(folder, 1, cut("flat", values(1), context.rank, context.world_size), {}, context, keep=2)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank in small:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, unlimited[1]))
    messages = []
    for _ in range(2):
        with pytest.raises(CheckpointError) as failed:
            save(folder, 2, big, {}, context, keep=1)
        messages.append(str(failed.value))
    context.barrier()
    listing = sorted(os.listdir(folder))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    context.barrier()
    save(folder, 3, big, {}, context, keep=1)
    return [*messages, *listing]


@pytest.mark.parametrize("small", [[0], [1], [0, 1]])
def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_training_goes_on(
    tmp_path: Path, small: list[int]
) -> None:
    first, second = run_ranks(save_with_a_small_disk, 2, tmp_path, small)
    assert first == second
    *messages, listing = first
    assert listing == "step-00000001"
    for message in messages:
        assert message.startswith("the checkpoint of step 2 was not saved: ")
        assert f"File too large on rank {small[0]}" in message
        assert message.endswith("; earlier checkpoints stay.")
    assert os.listdir(tmp_path) == ["step-00000003"]


def fail_on_rank_0(context: ParallelContext, folder: Path, where: str, call: int) -> str:
    """The disk breaks for rank 0 alone, in a `call` of one function; the step can be saved afterwards."""
    save(folder, 1, cut("replicas", values(1), context.rank, 2), {}, context, keep=2)
    calls, function = itertools.count(), getattr(commit, where)

    def broken(*arguments: Any) -> Any:
        if context.rank == 0 and next(calls) == call:
            raise OSError(5, "Input/output error")
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, where, broken)
        with pytest.raises(CheckpointError) as failed:
            save(folder, 2, cut("replicas", values(2), context.rank, 2), {}, context, keep=1)
    save(folder, 2, cut("replicas", values(2), context.rank, 2), {}, context, keep=2)
    return str(failed.value)


@pytest.mark.parametrize(("where", "call"), [("begin", 0), ("publish", 0), ("sync_folder", 0)])
def test_what_only_rank_0_runs_into_reaches_all(tmp_path: Path, where: str, call: int) -> None:
    first, second = run_ranks(fail_on_rank_0, 2, tmp_path, where, call)
    assert first == second
    assert "Input/output error on rank 0" in first
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_job_that_lost_its_lock_does_not_commit(tmp_path: Path) -> None:
    save_plain(tmp_path, 1)
    with pytest.raises(CheckpointError, match="another job has taken over the run folder"):
        save(
            tmp_path, 2, whole(values(2)), {}, SINGLE, keep=1, lost=lambda: "another job has taken over the run folder"
        )
    assert os.listdir(tmp_path) == ["step-00000001"]
