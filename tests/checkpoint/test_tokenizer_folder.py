"""Damage to the tokenizer of a run is found by readers and mended by the next start."""

import os
from pathlib import Path

import pytest

from megalite.checkpoint.run_folder import TOKENIZER, check_tokenizer, keep_tokenizer
from megalite.data.tokenizers import byte_tokenizer
from megalite.errors.problems import UserError
from megalite.prepare.prepare import char_tokenizer

BYTE = byte_tokenizer()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / TOKENIZER).iterdir()}


@pytest.fixture
def known(tmp_path: Path) -> dict[str, str]:
    return keep_tokenizer(tmp_path, BYTE.files(), {})


@pytest.mark.parametrize("harm", ["gone", "half", "flipped", "another"])
def test_damage_is_found_and_mended(tmp_path: Path, known: dict[str, str], harm: str) -> None:
    check_tokenizer(tmp_path, known)
    (folder := tmp_path / TOKENIZER).rename(tmp_path / "elsewhere")
    if harm == "another":
        char_tokenizer(["abc"]).save(folder)
    elif harm != "gone":
        folder.mkdir()
        whole = BYTE.files()["tokenizer.json"]
        (folder / "tokenizer.json").write_bytes(whole if harm == "half" else whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=r"cannot be read|is not what the run"):
        check_tokenizer(tmp_path, known)
    assert keep_tokenizer(tmp_path, BYTE.files(), known) == known
    assert content(tmp_path) == BYTE.files()
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", TOKENIZER]


def test_a_file_in_its_place_is_somebody_s(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER).write_text("mine")
    with pytest.raises(UserError, match=r"it cannot be used: .*File exists"):
        keep_tokenizer(tmp_path, BYTE.files(), {})
    assert (tmp_path / TOKENIZER).read_text() == "mine"


def test_what_is_as_the_checkpoint_tells_is_left_alone(tmp_path: Path) -> None:
    """Another version of a library may write the same tokenizer in another way."""
    other = char_tokenizer(["abc"])
    known = keep_tokenizer(tmp_path, other.files(), {})
    assert keep_tokenizer(tmp_path, BYTE.files(), known) == known
    assert content(tmp_path) == other.files()
