"""A damaged checkpoint is never loaded: it is reported and set aside, and the one before is used."""

import ast
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint import manifest as manifests
from megalite.checkpoint import reading
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.reading import Found, newest
from megalite.checkpoint.store import save
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from tests.checkpoint.samples import SINGLE, blank, cut, equal, files_below, no_report, values, whole
from tests.ranks import run_ranks

DATA = "rank-00000.safetensors"


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    """A folder with steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "checkpoints", step, whole(values(step)), {"step": step}, SINGLE, keep=2)
    return tmp_path / "checkpoints"


def rewrite_manifest(checkpoint: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Change the manifest, with the right hash behind it, as a forger or a bug of ours would."""
    path = checkpoint / "manifest.json"
    path.write_bytes(change(Manifest.parse(path.read_bytes(), checkpoint)).render())


def load(found: Found | None) -> int:
    """Read the checkpoint into live tensors; the step whose values they have."""
    assert found is not None
    pieces = blank(whole(values(found.manifest.step)))
    found.read_into(pieces)
    assert equal(pieces, whole(values(found.manifest.step)))
    return found.manifest.step


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
    monkeypatch.setattr(reading, "file_fault", lambda *_: None)
    found = newest(two_steps, SINGLE, no_report)
    assert found is not None
    pieces = blank(whole(values(2)))
    found.read_into(pieces)
    assert not equal(pieces, whole(values(2)))


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / DATA, 1000)


def lose_the_data(checkpoint: Path) -> None:
    (checkpoint / DATA).unlink()


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def lose_the_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def take_data_of_the_step_before(checkpoint: Path) -> None:
    shutil.copy(checkpoint.with_name("step-00000001") / DATA, checkpoint)


def copy_the_step_before_under_this_name(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-00000001"), checkpoint)


def fill_the_manifest_with_rubbish(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(b"[" * 100_000)


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "rank-00000.safetensors is damaged",
    lose_the_data: "rank-00000.safetensors cannot be read: No such file",
    lose_the_manifest: "manifest.json cannot be read: No such file",
    lose_the_state: "state.json cannot be read: No such file",
    take_data_of_the_step_before: "rank-00000.safetensors is damaged",
    copy_the_step_before_under_this_name: "it says that it is step 1",
    fill_the_manifest_with_rubbish: "manifest.json or state.json is damaged",
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.items(), ids=[damage.__name__ for damage in DAMAGES])
def test_the_one_before_is_used_and_the_damage_told(
    two_steps: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(two_steps / "step-00000002")
    reports: list[str] = []
    assert load(newest(two_steps, SINGLE, reports.append)) == 1
    (report,) = reports
    (aside,) = [path.name for path in two_steps.iterdir() if ".bad-" in path.name]
    assert report.startswith("checkpoint step-00000002 is damaged and was passed over: ")
    assert reason in report
    assert report.endswith(f"; kept as {aside}")
    assert load(newest(two_steps, SINGLE, no_report)) == 1
    assert save(two_steps, 2, whole(values(2)), {}, SINGLE, keep=2).path.name == "step-00000002"


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


def test_another_format_is_refused_with_what_reads_it(two_steps: Path) -> None:
    write_later_format(two_steps / "step-00000002")
    before = files_below(two_steps)
    with pytest.raises(UserError, match=r"it has format 3; this megalite reads format 2[\s\S]*go on with"):
        newest(two_steps, SINGLE, no_report)
    assert files_below(two_steps) == before


NAMES = ("old-step-00000009", "step-00000009-bak", "step-9", "Step-00000009", ".tmp-step-00000009-01234567")


def test_only_exact_names_of_folders_are_checkpoints(two_steps: Path) -> None:
    for name in (*NAMES, "step-00000009.bad-20260102-030405-0a1b"):
        shutil.copytree(two_steps / "step-00000001", two_steps / name)
    (two_steps / "step-00000007").touch()
    before = files_below(two_steps)
    assert load(newest(two_steps, SINGLE, no_report)) == 2
    assert files_below(two_steps) == before


def test_a_link_to_a_checkpoint_is_followed_and_one_to_another_step_is_damage(two_steps: Path) -> None:
    link, elsewhere = two_steps / "step-00000002", two_steps.with_name("elsewhere")
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    assert load(newest(two_steps, SINGLE, no_report)) == 2
    link.unlink()
    link.symlink_to("step-00000001")
    reports = list[str]()
    assert load(newest(two_steps, SINGLE, reports.append)) == 1
    assert "it says that it is step 1" in reports[0]


def test_one_that_cannot_be_renamed_is_passed_over_all_the_same(
    two_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_data(two_steps / "step-00000002")

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    reports = list[str]()
    assert load(newest(two_steps, SINGLE, reports.append)) == 1
    assert reports[0].endswith("; not renamed: Read-only file system")


def test_a_step_that_a_person_names_is_read_or_refused(two_steps: Path) -> None:
    assert load(newest(two_steps, SINGLE, no_report, step=1)) == 1
    with pytest.raises(UserError, match=r"step=7: there is no checkpoint of it .*\n.*those there are: 1, 2"):
        newest(two_steps, SINGLE, no_report, step=7)
    lose_the_data(two_steps / "step-00000002")
    with pytest.raises(UserError, match="it cannot be read; rank-00000"):
        newest(two_steps, SINGLE, no_report, step=2)
    assert load(newest(two_steps, SINGLE, [].append, look_only=True)) == 1
    assert (two_steps / "step-00000002").exists(), "who only looks renames nothing"


def newest_of_ranks(context: ParallelContext, folder: Path) -> tuple[int, list[str]]:
    reports: list[str] = []
    found = newest(folder, context, reports.append)
    return load(found), reports


def test_ranks_share_the_verification_and_reach_one_decision(two_steps: Path) -> None:
    lose_the_data(two_steps / "step-00000002")
    (first, reports), (second, silence) = run_ranks(newest_of_ranks, 2, two_steps)
    assert first == second == 1
    assert [report[:24] for report in reports] == ["checkpoint step-00000002"]
    assert silence == []


def test_no_module_reads_pickles() -> None:
    """Unpickling may run any code; a checkpoint is JSON and the bytes of tensors."""
    rooms = [Path(reading.__file__).parents[1] / room for room in ("checkpoint", "train", "hf")]
    for path in (path for room in rooms for path in room.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not {"pickle", "torch.distributed.checkpoint"} & set(names), f"{path}:{node.lineno}"
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "torch.save"), f"{path}:{node.lineno}"
