"""Preparing replaces nothing that it did not make: no text, no token files of other makers, no other tokenizer."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megalite.commands.models import prepare
from megalite.config.compose import load_config
from megalite.errors.problems import UserError
from megalite.prepare import prepare as preparation

TEXT = "".join(json.dumps({"text": f"document {number} of a tree by the river"}) + "\n" for number in range(50))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    Path("books.json").write_text(TEXT)
    return tmp_path / "place"


def make(output: str, path: str = "books.json", tokenizer: str = "byte") -> int:
    return prepare(["data=text", f"data.path={path}", f"tokenizer={tokenizer}", "--output", output])


def content(folder: Path) -> dict[str, bytes]:
    """Every file by its path."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def a_pair_of_megatron() -> None:
    make("x")
    Path("x.json").unlink()
    shutil.rmtree("x.tokenizer")


def another_tokenizer() -> None:
    Path("x.tokenizer").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save("x.tokenizer/tokenizer.json")


def a_link() -> None:
    make("made")
    Path("x.bin").symlink_to(Path("made.bin").absolute())


IN_THE_PLACE: dict[str, tuple[str, Callable[[], object]]] = {  # an output, and what is put in its place
    "the text": ("../place/./books", lambda: None),
    "a hard link to the text": ("x", lambda: os.link("books.json", "x.json")),
    "data of another maker": ("x", lambda: Path("x.bin").write_bytes(bytes(range(256)) * 9)),  # nanoGPT's: no index
    "a pair of Megatron": ("x", a_pair_of_megatron),
    "an empty idx": ("x", lambda: Path("x.idx").touch()),
    "a link": ("x", a_link),
    "another tokenizer": ("x", another_tokenizer),
}


@pytest.mark.parametrize(("output", "put"), IN_THE_PLACE.values(), ids=IN_THE_PLACE)
def test_what_is_not_ours_stays_and_nothing_is_tokenized(
    place: Path,
    output: str,
    put: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    put()
    before = content(place)
    monkeypatch.setattr(preparation, "tokenize_shards", pytest.fail)
    capfd.readouterr()
    assert make(output) == 2
    [name] = re.findall(r"fix: --output=(.*), or move it away", capfd.readouterr().err)
    assert content(place) == before
    monkeypatch.undo()
    assert make(name, str(place / "books.json")) == 0, "the remedy works"


def test_what_is_made_is_not_inside_the_folder_that_is_read(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its facts and its tokenizers would be text next time."""
    Path("rows/more").mkdir(parents=True)
    shutil.copy("books.json", "rows/a.jsonl")
    Path("link").symlink_to("rows/more")
    for output in ("rows/x", "link/x"):
        assert make(output, "rows") == 2
        assert "a folder that is read whole" in capfd.readouterr().err
    assert [path.name for path in Path("rows").iterdir() if path.is_file()] == ["a.jsonl"]
    for path, cache in (("./rows", "rows/cache"), ("./rows", "link/cache"), ("link", "rows/more/cache")):
        with pytest.raises(UserError, match="would write into its own data"):
            load_config(["data=text", f"data.path={path}", f"data.cache_dir={cache}"], 1)


def test_the_copy_that_datasets_keeps_of_a_local_folder_is_its_user_s_alone(place: Path) -> None:
    Path("rows").mkdir()
    shutil.copy("books.json", "rows/a.jsonl")
    command = (
        'umask 022; exec "$0" -m megalite prepare data=hf data.path=./rows tokenizer=byte data.workers=1 --output x'
    )
    variables = {**os.environ, "HF_HOME": str(place / "hf"), "HF_DATASETS_CACHE": str(place / "hf")}
    subprocess.run(["bash", "-c", command, sys.executable], env=variables, check=True, capture_output=True)
    found = list((place / "hf").rglob("*.arrow"))
    assert found
    assert [path for path in found if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o600, 0o700), (0o002, 0o664, 0o775)])
def test_the_cache_and_what_is_asked_for_elsewhere_are_their_user_s_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, umask: int, file: int, folder: int
) -> None:
    """Workers of their own write, too. A umask that somebody chose stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    before = os.umask(umask)
    try:
        for tokenizer, workers in (("bpe", 2), ("char", 1)):
            words = ["data=text", "data.path=books.json", f"tokenizer={tokenizer}", f"data.workers={workers}"]
            preparation.prepare(load_config([*words, "data.bpe_vocab_size=300"], 1))
            preparation.prepare(load_config([*words, "data.bpe_vocab_size=301"], 1))
        assert make("out/x") == 0
        assert os.umask(umask) == umask
    finally:
        os.umask(before)

    def modes(top: Path) -> set[tuple[bool, int]]:
        return {(path.is_dir(), path.stat().st_mode & 0o777) for path in [top, *top.rglob("*")]}

    assert len(list((place / "cache").rglob("*"))) > 15
    assert modes(place / "cache") == {(False, file), (True, folder)}
    assert modes(place / "out") == {(False, file), (True, folder)}
