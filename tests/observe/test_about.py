"""What a run says of the program that it runs: its version, and the commit of its checkout."""

import subprocess
from pathlib import Path

from megalite import __version__
from megalite.observe.about import commit, versions


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_the_commit_of_a_checkout_and_whether_it_has_changes(tmp_path: Path) -> None:
    assert commit(tmp_path) == {}  # an installed megalite
    git(tmp_path, "init")
    assert commit(tmp_path) == {}  # no commit yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag is not what is asked for")
    (clean,) = commit(tmp_path).values()
    assert len(clean) == 12
    assert set(clean) <= {*"0123456789abcdef"}
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == {"commit": f"{clean}-dirty"}


def test_the_version_is_known_without_an_installation() -> None:
    assert versions()["megalite"] == __version__
