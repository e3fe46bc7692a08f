"""Checkpoints go to an object store behind the training, and come back from there; what fails loses nothing else."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import remote as remotes
from megalite.checkpoint import uploads as upload_module
from megalite.checkpoint.reading import Found, newest
from megalite.checkpoint.remote import Remote, open_remote
from megalite.checkpoint.run_folder import RunFolder
from megalite.checkpoint.store import save
from megalite.checkpoint.uploads import Uploads
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from tests.checkpoint.samples import SINGLE, cut, values
from tests.checkpoint.test_damage import flipped, load
from tests.checkpoint.test_run_folder import settings
from tests.object_store.server import ObjectStore
from tests.ranks import run_ranks

DATA = "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "PAUSES_S", (0.05,))
    monkeypatch.setattr(upload_module, "LOOK_S", 0.05)
    monkeypatch.setattr(upload_module, "SHORT_S", 0.5)
    monkeypatch.setattr(remotes, "PAUSE_S", 0.05)


class Run:
    """A run on one process that saves without a training; `told`: its events."""

    def __init__(self, path: Path, remote: Remote, keep: int = 2, context: ParallelContext = SINGLE) -> None:
        self.path, self.remote, self.keep, self.told = path, remote, keep, list[tuple[str, int, str]]()
        self.context, config = context, settings(checkpoint__remote=remote.url)
        self.folder = RunFolder(path, context, "auto", lambda step: config, "data-1", remote)
        try:
            self.found = newest(self.folder.checkpoints, context, self.note, remote=remote)
        except UserError:
            self.folder.withdraw()
            raise
        if context.rank == 0:
            self.folder.begin(config)
        context.barrier()
        self.uploads = Uploads(remote, self.folder, context, keep)

    def save(self, step: int, good_before: int = 0) -> None:
        pieces = cut("flat", values(step), self.context.rank, self.context.world_size)
        (self.path / "metrics.jsonl").write_text("".join(f'{{"step": {at}}}\n' for at in range(1, step + 1)))
        content = (self.path / "metrics.jsonl").read_bytes()
        seal = {"metrics.jsonl": {"bytes": len(content), "hash": remotes.digest(content)}}
        state = {"config": settings(), "record": seal}
        spared = {"labels": self.folder.labels, "spared": lambda: self.uploads.step, "good_before": good_before}
        save(self.folder.checkpoints, step, pieces, state, self.context, self.keep, **spared)  # type: ignore[arg-type]
        self.uploads.offer(step, good_before)

    def tell(self, kind: str, step: int, **fields: Any) -> None:
        self.told.append((kind, step, fields.get("message", "")))

    def note(self, text: str) -> None:
        self.told.append(("note", 0, text))

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.told
            time.sleep(0.01)
            self.uploads.report(self.tell)

    def uploaded(self, step: int) -> None:
        self.wait(lambda: ("uploaded", step, "") in self.told)

    def end(self, hurried: bool = False) -> str:
        left = self.uploads.end(lambda: hurried, self.note, self.tell)
        self.folder.close()
        return left


@pytest.fixture
def remote(object_store: ObjectStore) -> Remote:
    return Remote(object_store.url())


@pytest.fixture
def run(tmp_path: Path, remote: Remote) -> Iterator[Run]:
    made = Run(tmp_path / "run", remote)
    yield made
    made.end(hurried=True)


def key(remote: Remote, step: int, name: str) -> str:
    return f"{remote.url}/checkpoints/step-{step:08d}/{name}"


def test_what_was_uploaded_goes_on_in_an_empty_folder(run: Run, tmp_path: Path) -> None:
    run.save(1)
    assert run.end() == ""
    assert [event for event in run.told if event[0] != "note"] == [("uploaded", 1, "")]
    again = Run(tmp_path / "elsewhere", run.remote)
    assert load(again.found) == 1
    assert again.folder.run_id == run.folder.run_id
    assert (again.path / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()
    assert json.loads((again.path / "run.json").read_text()) == again.folder.labels
    again.save(2)
    assert again.end() == ""
    assert run.remote.complete() == [2, 1]
    third = Run(run.path, run.remote)  # which has step 1
    assert load(third.found) == 2
    assert (third.path / "metrics.jsonl").read_bytes() == (again.path / "metrics.jsonl").read_bytes()
    third.uploads.offer(2, 0)
    assert third.end() == ""
    assert not [kind for kind, *_ in third.told if kind != "note"], "it is there already"


def test_the_manifest_is_written_last_and_deleted_first(run: Run, object_store: ObjectStore) -> None:
    for step in (1, 2, 3):
        run.save(step)
        run.uploaded(step)
    assert run.end() == ""
    assert run.remote.complete() == [3, 2]
    assert set(run.remote.sizes()) == {3, 2}
    prefix = key(run.remote, 1, "")[5:]
    changes = [(method, name[len(prefix) :]) for method, name, _ in object_store.requests if name.startswith(prefix)]
    changes = [change for change in changes if change[0] in ("PUT", "DELETE")]
    assert changes[-4:] == [
        ("PUT", "manifest.json"),
        *(("DELETE", name) for name in ("manifest.json", DATA, "state.json")),
    ]


def test_the_newest_good_one_stays(run: Run) -> None:
    for step in (1, 2, 3, 4):
        run.save(step, good_before=2)
        run.uploaded(step)
    assert run.remote.complete() == [4, 3, 1]


def test_a_dead_store_holds_up_nobody_and_is_told_once(run: Run, object_store: ObjectStore) -> None:
    run.save(1)
    run.uploaded(1)
    with object_store.dead():
        begun = time.monotonic()
        run.save(2)
        assert time.monotonic() - begun < 1
        run.wait(lambda: len(run.told) > 1)
        time.sleep(1)
        run.uploads.report(run.tell)
        assert [(kind, step) for kind, step, _ in run.told] == [("uploaded", 1), ("upload_failed", 2)]
        assert "onnect" in run.told[1][2]
        run.save(3)
        run.wait(lambda: len(run.told) > 2)
    run.uploaded(3)
    assert run.remote.complete() == [3, 1]
    assert run.end() == ""


def test_at_its_end_a_run_waits_and_says_what_is_not_uploaded(
    run: Run, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upload_module, "PATIENCE_S", 1.5)
    monkeypatch.setattr(upload_module, "SHORT_S", 0.5)
    with object_store.failing("hang", methods="PUT", keys=f"*{run.remote.url[5:]}*"):
        run.save(1)
        begun = time.monotonic()
        assert run.end() == "the checkpoint of step 1 is not uploaded; the next start in this folder does it"
        assert 1.5 <= time.monotonic() - begun < 4
        assert ("note", 0, "waiting for the upload of step 1, for 2 s at most") in run.told
        again = Run(run.path, run.remote)
        again.uploads.offer(1, 0)
        begun = time.monotonic()
        assert again.end(hurried=True)
        assert time.monotonic() - begun < 1.5
    last = Run(run.path, run.remote)
    last.uploads.offer(1, 0)
    monkeypatch.setattr(upload_module, "PATIENCE_S", 30)
    assert last.end() == ""
    assert run.remote.complete() == [1]


def test_the_newest_wins_and_what_is_uploaded_is_not_deleted_here(run: Run, object_store: ObjectStore) -> None:
    with object_store.failing("delay", methods="PUT", keys=f"*step-00000001/{DATA}", seconds=2):
        run.save(1)
        run.wait(lambda: run.uploads.step == 1 and object_store.count("PUT", key(run.remote, 1, DATA)))
        for step in (2, 3, 4):
            run.save(step)
        assert sorted(path.name[-1] for path in run.folder.checkpoints.iterdir()) == ["1", "3", "4"]
        run.uploaded(1)
    run.uploaded(4)
    skipped = [(step, why) for kind, step, why in run.told if kind == "upload_failed"]
    assert skipped == [(at, "it is skipped, as that of step 1 is still under way") for at in (2, 3)]
    assert run.remote.complete() == [4, 1]


def test_a_checkpoint_that_is_gone_is_passed_over(run: Run, object_store: ObjectStore) -> None:
    with object_store.failing("delay", methods="PUT", keys=f"*step-00000001/{DATA}", seconds=1):
        run.save(1)
        run.wait(lambda: object_store.count("PUT", key(run.remote, 1, DATA)))
        with object_store.failing(503, methods="PUT|HEAD", keys=f"*step-00000001/{DATA}"):
            shutil.rmtree(run.folder.checkpoints / "step-00000001")
            run.wait(lambda: run.uploads.step is None)
    assert "it was deleted here" in run.told[0][2]
    run.save(2)
    run.uploaded(2)
    assert list(run.remote.sizes()) == [2], "what was begun there is deleted"


@pytest.mark.parametrize("name", [DATA, "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "gone"])
def test_a_damaged_one_there_is_passed_over_and_said(run: Run, tmp_path: Path, name: str, how: str) -> None:
    for step in (1, 2):
        run.save(step)
        run.uploaded(step)
    place = key(run.remote, 2, name)
    content = run.remote.files.cat_file(place)
    if how == "gone":
        run.remote.files.rm_file(place)
    else:
        run.remote.files.pipe_file(place, content[:-7] if how == "truncated" else flipped(content, len(content) * 4))
    again = Run(tmp_path / "elsewhere", run.remote)
    assert load(again.found) == 1
    if name != "manifest.json" or how != "gone":  # else it is no checkpoint
        [said] = [text for _, _, text in again.told if "is damaged and was passed over" in text]
        assert name in said
        assert "step-00000002" in said
    assert run.remote.complete() == [1]
    again.save(2)
    assert again.end() == ""
    third = Run(tmp_path / "third", run.remote)
    assert load(third.found) == 2
    third.end()


def test_a_damaged_one_here_is_brought_again(run: Run) -> None:
    for step in (1, 2):
        run.save(step)
        run.uploaded(step)
    path = run.folder.checkpoints / "step-00000002" / DATA
    path.write_bytes(flipped(path.read_bytes(), 999))
    run.end()
    again = Run(run.path, run.remote)
    assert load(again.found) == 2
    assert any("is damaged and was brought again" in text for _, _, text in again.told)
    again.end()


def test_all_that_is_there_damaged_is_refused(run: Run, tmp_path: Path) -> None:
    run.save(1)
    run.uploaded(1)
    run.remote.files.pipe_file(key(run.remote, 1, DATA), b"nothing")
    with pytest.raises(UserError, match="no checkpoint of this run can be read"):
        Run(tmp_path / "elsewhere", run.remote)
    assert run.remote.complete() == [1], "nothing is renamed"


def test_an_unfinished_upload_is_none(run: Run, tmp_path: Path, object_store: ObjectStore) -> None:
    run.save(1)
    run.uploaded(1)
    with object_store.failing(500, methods="PUT", keys=f"{run.remote.url[5:]}/checkpoints/step-00000002/manifest.json"):
        run.save(2)
        run.wait(lambda: len(run.told) > 1)
        assert {DATA, "state.json"} == set(run.remote.sizes()[2])
        again = Run(tmp_path / "elsewhere", run.remote)
        assert load(again.found) == 1
        again.end()


@pytest.mark.parametrize("name", [DATA, "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "truncate", 403, 503, "refuse"])
def test_an_upload_that_fails_is_done_again(
    run: Run, tmp_path: Path, object_store: ObjectStore, name: str, how: Any
) -> None:
    with object_store.failing(how, methods="PUT", keys=f"{key(run.remote, 1, name)[5:]}", times=1) as fault:
        run.save(1)
        run.uploaded(1)
        assert fault.struck == 1
    again = Run(tmp_path / "elsewhere", run.remote)
    assert load(again.found) == 1
    assert not [text for _, _, text in again.told if "damaged" in text]
    again.end()


def test_transient_failures_of_a_download_are_tried_again(run: Run, tmp_path: Path, object_store: ObjectStore) -> None:
    run.save(1)
    run.uploaded(1)
    for how in ("cut", "truncate", "corrupt", 500, 403):
        with object_store.failing(how, methods="GET", keys=f"*{DATA}", times=2) as fault:
            again = Run(tmp_path / f"elsewhere-{how}", run.remote)
            assert fault.struck == 2
        assert load(again.found) == 1
        again.end()


def test_a_store_that_does_not_answer_now_refuses_a_start(run: Run, tmp_path: Path, object_store: ObjectStore) -> None:
    """The newest checkpoint may be there: going on from an older one would lose steps."""
    for step in (1, 2):
        run.save(step)
        run.uploaded(step)
    with object_store.failing(403, methods="GET", keys=f"*step-00000002/{DATA}"):
        with pytest.raises(UserError, match=r"cannot be read now.*\n.*checkpoint.remote=null to go on without it"):
            Run(tmp_path / "elsewhere", run.remote)
        assert not list((tmp_path / "elsewhere" / "checkpoints").iterdir())
    again = Run(tmp_path / "elsewhere", run.remote)
    assert load(again.found) == 2
    again.end()


def test_another_run_s_prefix_is_refused(run: Run, tmp_path: Path) -> None:
    run.save(1)
    run.uploaded(1)
    other = Run(tmp_path / "other", Remote(run.remote.url + "-other"))
    other.save(1)
    other.end()
    with pytest.raises(UserError, match=f"those of run {run.folder.run_id}, and the folder is that of"):
        RunFolder(other.path, SINGLE, "auto", lambda step: settings(), "data-1", run.remote)
    config = settings(checkpoint__remote=run.remote.url)
    for resume, fingerprint, changes, words in (
        ("never", "data-1", {}, "resume=never was asked for"),
        ("auto", "data-2", {}, "data or tokenizer differ"),
        ("auto", "data-1", {"seed": 5}, "was started with seed=1234"),
    ):
        with pytest.raises(UserError, match=words):
            RunFolder(
                tmp_path / "new", SINGLE, resume, lambda step, now={**config, **changes}: now, fingerprint, run.remote
            )
        assert not (tmp_path / "new").exists(), "nothing is left"


def test_a_run_that_comes_later_does_not_take_a_prefix_over(tmp_path: Path, remote: Remote) -> None:
    first, second = Run(tmp_path / "first", remote), Run(tmp_path / "second", remote)  # nothing is there yet
    first.save(1)
    first.uploaded(1)
    second.save(5)
    second.wait(lambda: second.told)
    assert f"those of run {first.folder.run_id}" in second.told[0][2]
    first.save(2)
    first.uploaded(2)
    assert remote.complete() == [2, 1]
    for each in (first, second):
        each.end(hurried=True) if each is first else each.uploads.end(lambda: True, each.note, each.tell)


@pytest.mark.parametrize(
    ("how", "words"), [("refuse", "onnect"), (403, "on purpose"), (500, "on purpose"), ("hang", "no answer within")]
)
def test_a_store_that_cannot_be_used_is_refused_within_seconds(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, how: Any, words: str
) -> None:
    monkeypatch.setattr(remotes, "ANSWER_S", 5.0)
    url, begun = object_store.url(), time.monotonic()
    with object_store.failing(how, keys=f"{url[5:]}*"), pytest.raises(UserError, match=words) as refused:
        open_remote(url, SINGLE)
    assert time.monotonic() - begun < 8
    assert refused.value.problems[0].setting == "checkpoint.remote"
    with pytest.raises(UserError, match="bucket does not exist"):
        open_remote("s3://no-such-bucket/x", SINGLE)
    assert open_remote(url, SINGLE) is not None
    assert not Remote(url).files.find(url), "nothing is left of the question"


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_other_stores(protocol: str, tmp_path: Path) -> None:
    remote = open_remote(f"{protocol}://{tmp_path}/store/runs", SINGLE)
    assert remote is not None
    run = Run(tmp_path / "run", remote, keep=1)
    for step in (1, 2):
        run.save(step)
        run.uploaded(step)
    assert run.end() == ""
    assert remote.complete() == [2]
    again = Run(tmp_path / "elsewhere", remote)
    assert load(again.found) == 2
    again.end()


def upload_on_ranks(
    context: ParallelContext, path: Path, url: str, broken: list[int], environment: dict[str, str]
) -> Any:
    import os

    os.environ.update(environment)
    upload_module.PAUSES_S, upload_module.LOOK_S = (0.05,), 0.05
    upload_module.STANDSTILL_S, upload_module.PATIENCE_S = 0.5, 20
    run = Run(path, Remote(url), context=context)
    put = run.remote.put

    def refuses(source: Path | bytes, name: str) -> None:
        if context.rank in broken and "step-00000001" in name:
            raise PermissionError("this rank has no credentials")
        put(source, name)

    run.remote.put = refuses  # type: ignore[method-assign]
    for step in (1, 2):
        run.save(step)
        if step == 1 and context.rank == 0:
            run.wait(lambda: run.told if broken else run.uploads.step is None)
        context.barrier()
    left = run.end()
    files = dict(run.remote.sizes())
    return run.told, left, {step: sorted(names) for step, names in files.items()}


def test_each_rank_uploads_what_it_has_written(tmp_path: Path, object_store: ObjectStore) -> None:
    url = object_store.url()
    results = run_ranks(upload_on_ranks, 3, tmp_path / "run", url, [], object_store.environment)
    told, left, files = results[0]
    assert left == ""
    assert [(kind, step) for kind, step, _ in told if kind != "note"] == [("uploaded", 1), ("uploaded", 2)]
    own = [f"rank-{rank:05d}.safetensors" for rank in range(3)]
    assert files == {step: sorted(["manifest.json", "state.json", *own]) for step in (1, 2)}
    again = Run(tmp_path / "elsewhere", Remote(url))
    assert load(again.found) == 2
    again.end()


def test_a_rank_that_cannot_upload_holds_up_no_later_checkpoint(tmp_path: Path, object_store: ObjectStore) -> None:
    url = object_store.url()
    results = run_ranks(upload_on_ranks, 2, tmp_path / "run", url, [1], object_store.environment)
    assert results[1][0][0][:2] == ("upload_failed", 1)
    assert "no credentials" in results[1][0][0][2]
    assert ("upload_failed", 1) in [event[:2] for event in results[0][0]]
    assert results[0][1] == ""
    assert [step for step, names in results[0][2].items() if "manifest.json" in names] == [2]


def test_no_thread_is_left(run: Run) -> None:
    run.save(1)
    assert run.end() == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "upload"]
    assert isinstance(run.remote.newest(0, None), Found)
