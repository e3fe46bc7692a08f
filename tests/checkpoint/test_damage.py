"""A damaged checkpoint is never loaded: it is reported and set aside, and the one before is used."""

import ast
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import manifest as manifests
from megalite.checkpoint import store
from megalite.checkpoint.manifest import Manifest, StoredBox, StoredTensor
from megalite.checkpoint.store import Found, newest, save
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from tests.checkpoint.samples import SINGLE, blank, cut, equal, files_below, no_report, values, whole
from tests.ranks import run_ranks

DATA = "rank-00000.safetensors"


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    """A folder with steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, step, whole(values(step)), {"step": step}, SINGLE, keep=2)
    return tmp_path


def rewrite_manifest(checkpoint: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Change what the manifest says, with the right hash behind it, as a forger or a bug of ours would."""
    path = checkpoint / "manifest.json"
    path.write_bytes(change(Manifest.parse(path.read_bytes(), int(checkpoint.name.removeprefix("step-")))).render())


def load(found: Found | None) -> int:
    """Read the checkpoint into live tensors; the step whose values they have."""
    assert found is not None
    pieces = blank(whole(values(found.step)))
    found.read_into(pieces)
    assert equal(pieces, whole(values(found.step)))
    return found.step


def test_every_single_bit_flip_is_noticed(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Random flips, spread over all files so that the small ones get their share."""
    run_ranks(save_two, 2, tmp_path)
    (checkpoint,) = tmp_path.iterdir()
    names = sorted(os.listdir(checkpoint))
    assert names == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors", "state.json"]
    chance = random.Random(0)
    for trial in range(400 if pytestconfig.getoption("--full") else 100):
        path = checkpoint / names[trial % len(names)]
        content = path.read_bytes()
        bit = chance.randrange(len(content) * 8)
        path.write_bytes(flipped(content, bit))
        with pytest.raises(UserError, match=path.name) as refused:
            newest(tmp_path, SINGLE, no_report)
        assert "no checkpoint of this run can be read" in str(refused.value), (path.name, bit)
        path.write_bytes(content)
    assert load(newest(tmp_path, SINGLE, no_report)) == 3


def flipped(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ (1 << bit % 8)]) + content[bit // 8 + 1 :]


def save_two(context: ParallelContext, folder: Path) -> None:
    save(folder, 3, cut("flat", values(3), context.rank, 2), {"step": 3}, context, keep=1)


def test_without_the_hashes_a_flip_would_load_as_wrong_values(two_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: nothing else notices, so the test above tests the hashes."""
    path = two_steps / "step-00000002" / DATA
    content = path.read_bytes()
    at = content.index(values(2)["embedding.word.weight"].numpy().tobytes())
    path.write_bytes(flipped(content, at * 8 + 6))
    monkeypatch.setattr(store, "file_fault", lambda *_: None)
    found = newest(two_steps, SINGLE, no_report)
    assert found is not None
    pieces = blank(whole(values(2)))
    found.read_into(pieces)
    assert not equal(pieces, whole(values(2)))


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / DATA, 1000)


def change_the_header(checkpoint: Path) -> None:
    """A tensor of another shape with as many bytes, which safetensors itself would read."""
    path = checkpoint / DATA
    content = path.read_bytes()
    assert content.count(b'"shape":[64,12]') == 1
    path.write_bytes(content.replace(b'"shape":[64,12]', b'"shape":[12,64]'))


def lose_the_data(checkpoint: Path) -> None:
    (checkpoint / DATA).unlink()


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def lose_the_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def take_data_of_the_step_before(checkpoint: Path) -> None:
    shutil.copy(checkpoint.with_name("step-00000001") / DATA, checkpoint)


def swap_files(checkpoint: Path) -> None:
    os.rename(checkpoint / "state.json", checkpoint / "kept")
    os.rename(checkpoint / DATA, checkpoint / "state.json")
    os.rename(checkpoint / "kept", checkpoint / DATA)


def copy_the_step_before_under_this_name(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-00000001"), checkpoint)


def link_to_elsewhere(checkpoint: Path) -> None:
    outside = checkpoint.parent.parent / "outside"
    shutil.move(checkpoint / DATA, outside)
    (checkpoint / DATA).symlink_to(outside)


def link_the_manifest(checkpoint: Path) -> None:
    outside = checkpoint.parent.parent / "outside.json"
    shutil.move(checkpoint / "manifest.json", outside)
    (checkpoint / "manifest.json").symlink_to(outside)


def put_a_pipe_there(checkpoint: Path) -> None:
    (checkpoint / DATA).unlink()
    os.mkfifo(checkpoint / DATA)


def edit_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 20'))


def reformat_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


def fill_the_manifest_with_rubbish(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(b"[" * 100_000)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "rank-00000.safetensors has 1,000 bytes where"),
    (change_the_header, "rank-00000.safetensors is damaged"),
    (lose_the_data, "rank-00000.safetensors cannot be read: No such file"),
    (lose_the_manifest, "manifest.json cannot be read: No such file"),
    (lose_the_state, "state.json cannot be read: No such file"),
    (take_data_of_the_step_before, "rank-00000.safetensors is damaged"),
    (swap_files, "state.json has"),
    (copy_the_step_before_under_this_name, "manifest.json is damaged: it says that it is step 1"),
    (link_to_elsewhere, "rank-00000.safetensors cannot be read: Too many"),
    (link_the_manifest, "manifest.json cannot be read"),
    (put_a_pipe_there, "rank-00000.safetensors has 0 bytes"),
    (edit_the_manifest, "its hash does not match"),
    (reformat_the_manifest, "its hash does not match"),
    (fill_the_manifest_with_rubbish, "manifest.json is damaged"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_the_one_before_is_used_and_the_damage_told(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save(folder, step, whole(values(step)), {"step": step}, SINGLE, keep=2)
    damage(folder / "step-00000002")
    reports: list[str] = []
    assert load(newest(folder, SINGLE, reports.append)) == 1
    (report,) = reports
    assert report.startswith("checkpoint step-00000002 is damaged and was passed over: ")
    assert reason in report
    assert report.endswith("Going on from step 1.")
    (aside,) = [path.name for path in folder.iterdir() if ".bad-" in path.name]
    assert f"kept as {aside}" in report
    assert load(newest(folder, SINGLE, no_report)) == 1
    assert save(folder, 2, whole(values(2)), {}, SINGLE, keep=2).path.name == "step-00000002"


def with_box(manifest: Manifest, **changes: Any) -> Manifest:
    """The manifest with another box of `scale`."""
    scale = manifest.tensors["scale"]
    return replace(
        manifest, tensors={**manifest.tensors, "scale": scale._replace(boxes=[scale.boxes[0]._replace(**changes)])}
    )


WHOLE = StoredBox(DATA, 8, (0,), (4,))
FORGED: dict[str, Callable[[Manifest], Manifest]] = {
    **{
        f"names {name!r}, which is not a file of the checkpoint's own": lambda found, name=name: replace(  # type: ignore[misc]
            found, files={**found.files, name: found.files[DATA]}
        )
        for name in ("../outside", "/etc/passwd", "..", "a/b", "")
    },
    "scale does not lie within 'elsewhere'": lambda found: with_box(found, file="elsewhere"),
    "scale does not lie within 'rank": lambda found: with_box(found, start=found.files[DATA].size - 7),
    "scale does not lie within": lambda found: with_box(found, start=-1),
    "scale has a part that leaves the tensor": lambda found: with_box(found, offsets=(0,), sizes=(1,)),
    "w has data for 4 of its 8": lambda found: replace(found, tensors={"w": StoredTensor("F32", (8,), [WHOLE])}),
    "w has data twice": lambda found: replace(found, tensors={"w": StoredTensor("F32", (8,), [WHOLE, WHOLE])}),
    "w has the unknown dtype": lambda found: replace(found, tensors={"w": StoredTensor("F1", (4,), [WHOLE])}),
    "does not list state.json": lambda found: replace(found, files={DATA: found.files[DATA]}),
    "manifest.json is damaged: not enough values": lambda found: replace(found, tensors={"w": ("F32", (4,), [(0,)])}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize(("reason", "forge"), FORGED.items(), ids=FORGED)
def test_a_manifest_is_checked_before_anything_follows_it(
    two_steps: Path, reason: str, forge: Callable[[Manifest], Manifest]
) -> None:
    rewrite_manifest(two_steps / "step-00000002", forge)
    reports: list[str] = []
    assert load(newest(two_steps, SINGLE, reports.append)) == 1
    assert reason in reports[0]


def test_if_all_are_damaged_the_run_is_refused_and_nothing_renamed(two_steps: Path) -> None:
    for step in (1, 2):
        truncate(two_steps / f"step-0000000{step}")
    before = files_below(two_steps)
    with pytest.raises(UserError) as refused:
        newest(two_steps, SINGLE, no_report)
    assert [Path(problem.setting).name for problem in refused.value.problems] == ["step-00000002", "step-00000001"]
    assert files_below(two_steps) == before


def write_later_format(checkpoint: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "FORMAT", 3)
        content = Manifest(2, {}, {}, {}).render()
    (checkpoint / "manifest.json").write_bytes(content)


def write_old_format(checkpoint: Path) -> None:
    """The files and the manifest as megalite wrote them before it used safetensors."""
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    files = {name: [1, manifests.digest(b"x")] for name in (".metadata", "__0_0.distcp", "state.json")}
    fields = {"about": {}, "files": files, "format": 1, "step": 2}
    body = json.dumps(fields, indent=1, sort_keys=True).encode()
    content = json.dumps({**fields, "hash": manifests.digest(body)}, indent=1, sort_keys=True) + "\n"
    (checkpoint / "COMMIT.json").write_text(content)
    for name in files:
        (checkpoint / name).write_text("x")


FOREIGN = {
    "it has format 3; this megalite reads format 2": write_later_format,
    "an early megalite wrote it": write_old_format,
}


@pytest.mark.parametrize(("reason", "write"), FOREIGN.items(), ids=["later", "old"])
def test_another_format_is_refused_with_what_reads_it(
    two_steps: Path, reason: str, write: Callable[[Path], None]
) -> None:
    shutil.rmtree(two_steps / "step-00000001")
    write(two_steps / "step-00000002")
    before = files_below(two_steps)
    with pytest.raises(UserError, match=reason) as refused:
        newest(two_steps, SINGLE, no_report)
    assert "go on with" in str(refused.value)
    assert files_below(two_steps) == before


@pytest.mark.parametrize(
    "name", ["old-step-00000009", "step-00000009-bak", "step-9", "Step-00000009", "step-00000009.bad-1", "notes.txt"]
)
def test_only_exact_names_are_checkpoints(two_steps: Path, name: str) -> None:
    shutil.copytree(two_steps / "step-00000001", two_steps / name)
    (two_steps / "step-00000007").touch()
    before, told = files_below(two_steps), list[str]()
    assert load(newest(two_steps, SINGLE, told.append)) == 2
    assert [text.split(": ")[0] for text in told] == [
        f"{two_steps.name}/{each} is passed over" for each in sorted(["step-00000007", name])
    ]
    assert files_below(two_steps) == before


@pytest.mark.parametrize("name", [".tmp-step-00000009-01234567", "step-00000009.bad-20260102-030405-0a1b"])
def test_names_that_megalite_gave_are_passed_over_in_silence(two_steps: Path, name: str) -> None:
    shutil.copytree(two_steps / "step-00000001", two_steps / name)
    assert load(newest(two_steps, SINGLE, no_report)) == 2


def test_a_link_to_a_checkpoint_is_followed_and_one_to_that_of_another_step_is_none(two_steps: Path) -> None:
    link, elsewhere = two_steps / "step-00000002", two_steps.with_name("elsewhere")
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    assert load(newest(two_steps, SINGLE, no_report)) == 2
    link.unlink()
    link.symlink_to("step-00000001")
    told = list[str]()
    assert load(newest(two_steps, SINGLE, told.append)) == 1
    assert "it says that it is step 1" in told[0]


def newest_of_ranks(context: ParallelContext, folder: Path) -> tuple[int, list[str]]:
    reports: list[str] = []
    found = newest(folder, context, reports.append)
    return load(found), reports


def test_ranks_share_the_verification_and_reach_one_decision(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_ranks(save_step, 2, tmp_path, step)
    for step in (2, 3):
        path = tmp_path / f"step-0000000{step}" / "rank-00001.safetensors"
        path.write_bytes(flipped(path.read_bytes(), 8 * 700))
    (first, reports), (second, silence) = run_ranks(newest_of_ranks, 2, tmp_path)
    assert first == second == 1
    assert [report[:24] for report in reports] == ["checkpoint step-00000003", "checkpoint step-00000002"]
    assert silence == []


def save_step(context: ParallelContext, folder: Path, step: int) -> None:
    save(folder, step, cut("flat", values(step), context.rank, 2), {"step": step}, context, keep=9)


def test_no_module_reads_pickles() -> None:
    """Unpickling may run any code; a checkpoint is JSON and the bytes of tensors."""
    rooms = [Path(store.__file__).parents[1] / room for room in ("checkpoint", "train", "hf")]
    for path in (path for room in rooms for path in room.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not {"pickle", "torch.distributed.checkpoint"} & set(names), f"{path}:{node.lineno}"
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "torch.save"), f"{path}:{node.lineno}"
