"""Equal pictures give equal files, which appear only when they are complete; what cannot be drawn is refused early."""

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megalite.commands import buffers, ranks, schedule
from megalite.errors.problems import UserError
from megalite.plan.drawing import page, picture_problems, save_picture

DRAW_ALL = """
import sys
from megalite.commands import buffers, ranks, schedule
for command, words in {
    ranks: "--world-size 4 parallel.tp=2",
    schedule: "parallel.pp=2 train.global_batch_size=2 train.micro_batch_size=1",
    buffers: "model=gpt2 model.vocab_size=50257 optimizer.instances=2 --dp 4",
}.items():
    assert command.main([*words.split(), "--picture", f"{sys.argv[1]}/{command.__name__}.svg"]) == 0
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""


def test_equal_pictures_are_equal_files_whatever_the_users_settings(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text(
        "font.size: 30\nlines.linewidth: 9\nsvg.fonttype: path\nfont.family: serif\n"
    )
    drawn = []
    for name, folder in (("one", tmp_path), ("two", Path.cwd())):
        (tmp_path / name).mkdir()
        subprocess.run([sys.executable, "-c", DRAW_ALL, tmp_path / name], check=True, cwd=folder)
        drawn.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 3


def test_a_picture_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_space(self: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    old = tmp_path / "ranks.png"
    old.write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", run_out_of_space)
    with pytest.raises(UserError, match=r"--picture=.*No space left"):
        save_picture(lambda: page(["title"], 1, 1)[0], old, "ranks")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("ranks.png", b"old")]


def test_files_that_cannot_become_pictures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    assert picture_problems(tmp_path / "new.png", "ranks") == []
    for name, rule in (
        ("ranks.pdf", "must end in"),
        ("gone/ranks.png", "does not exist"),
        ("folder.png", "is a folder"),
    ):
        (problem,) = picture_problems(tmp_path / name, "ranks")
        assert rule in problem.rule


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_command_draws_over_its_own_pictures_alone(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    words = ["--world-size", "4", "--picture", str(path)]
    assert [ranks.main(words), ranks.main(words)] == [0, 0], capsys.readouterr().err
    by_ranks = path.read_bytes()
    Figure().savefig(path)
    by_the_user = path.read_bytes()
    for content, draw in (
        (by_ranks, lambda: schedule.main(["parallel.pp=2", "train.global_batch_size=16", "--picture", str(path)])),
        (by_the_user, lambda: ranks.main(words)),
        (b"", lambda: ranks.main(words)),
    ):
        path.write_bytes(content)
        assert draw() == 2
        assert f"fix: --picture={tmp_path}/a-2{path.suffix}" in capsys.readouterr().err
        assert path.read_bytes() == content
    with pytest.raises(UserError, match="holds something else"):  # it came while the picture was drawn
        save_picture(lambda: page(["title"], 1, 1)[0], path, "ranks")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_picture_without_matplotlib_is_refused_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megalite.plan.drawing.is_installed", lambda package: False)
    picture = str(tmp_path / "new.png")
    for command, words in ((schedule, ["parallel.pp=2"]), (buffers, []), (ranks, ["--world-size", "2"])):
        assert command.main([*words, "--picture", picture]) == 2
        said = capsys.readouterr()
        assert "pip install matplotlib" in said.err
        assert said.out == ""
