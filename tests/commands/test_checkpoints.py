"""`megalite checkpoints`: what a run has saved, whether it is whole, and which of it goes."""

import os
import shutil
from pathlib import Path

import pytest

from megalite.checkpoint.run_folder import take_lock
from megalite.commands.checkpoints import checkpoints
from megalite.config.compose import load_config
from megalite.launch.context import ParallelContext
from tests.train.runs import overrides, train_on_rank, write_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text.txt")
    words = overrides(folder, "run", "train.steps=20", "checkpoint.keep=9", "train.eval_interval=0")
    assert train_on_rank(ParallelContext(), load_config(words, 1)) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


def test_lists_the_newest_first_with_tokens_and_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints([str(run)]) == 0
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "tokens", "size", "written", "state"]
    assert [row.split()[:2] for row in rows] == [[str(at), f"{at * 8 * 64:,}"] for at in (20, 15, 10, 5)]
    assert all(row.endswith("  complete") for row in rows)
    assert total.startswith("4 checkpoints, ")


@pytest.mark.parametrize("whole", [False, True])
def test_damage_is_named_and_is_the_exit_status(run: Path, whole: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A byte that changed is seen by --verify alone, a file that is cut by both."""
    [file] = (run / "checkpoints/step-00000015").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert checkpoints([str(run), *(["--verify"] if whole else [])]) == int(whole)
    assert ("is damaged" in capsys.readouterr().out) == whole
    os.truncate(file, 100)
    assert checkpoints([str(run)]) == 1
    assert f"{file.name} is missing or of another size" in capsys.readouterr().out


def test_prunes_what_is_whole_beyond_the_newest(run: Path, tmp_path: Path) -> None:
    """A damaged one counts for nothing and stays; of a link only the link goes."""
    (run / "checkpoints/step-00000015/state.json").write_text("{}")
    elsewhere = (run / "checkpoints/step-00000005").rename(tmp_path / "elsewhere")
    (run / "checkpoints/step-00000005").symlink_to(elsewhere)
    assert checkpoints([str(run), "--prune", "3"]) == 1
    assert steps(run) == [5, 10, 15, 20]
    assert checkpoints([str(run), "--prune", "2"]) == 1
    assert steps(run) == [10, 15, 20]
    assert elsewhere.is_dir()


def test_refuses_a_folder_without_a_run_and_one_in_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints([str(run / "logs")]) == 2
    lock, _ = take_lock(run / "lock")
    assert checkpoints([str(run), "--prune", "1"]) == 2
    assert "in use by another job" in capsys.readouterr().err
    lock.close()
    assert steps(run) == [5, 10, 15, 20]
