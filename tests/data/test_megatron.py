"""Token files go both ways between here and the real megatron-core, byte for byte."""

import importlib.util
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megalite.config.schema import Config
from megalite.data.open import open_data
from megalite.data.token_file import TokenFile
from megalite.prepare.prepare import prepare
from megalite.prepare.tokenizing import verify
from tests.data.conftest import write_token_file
from tests.data.megatron.oracle import CASES, FIXTURES, HERE, IDS, Case

ROOT = Path(__file__).parents[2]


def write_here(case: Case, prefix: Path, longest: int = 1000) -> None:
    """The case as we write it: a document is one sequence, unless it is longer than `longest`."""
    documents = [list(chain(*document)) for document in case.documents]
    write_token_file(prefix, documents, np.dtype(case.dtype), longest=longest)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that we wrote: every dtype of ids, several sequences in a document, several files in one."""
    folder = tmp_path_factory.mktemp("ours")
    for name in IDS:
        write_here(CASES[name], folder / name)
    write_here(CASES["several"], folder / "cut", longest=2)
    return folder


@pytest.fixture(scope="module")
def megatron(ours: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, object]]]:
    """A folder of files that megatron-core wrote, and what it reads in ours."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed (requirements-test.txt)")
    theirs = tmp_path_factory.mktemp("theirs")
    command = [sys.executable, "-m", "tests.data.megatron.oracle", str(theirs), str(ours)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return theirs, json.loads(done.stdout)


def assert_holds(file: TokenFile, case: Case) -> None:
    """What we find in a file is the case."""
    assert file.tokens.dtype == np.dtype(case.dtype)
    assert file.tokens[:].tolist() == case.tokens
    assert file.lengths[:].tolist() == [len(sequence) for sequence in case.sequences]
    assert file.boundaries[:].tolist() == case.boundaries
    assert file.document_starts(-1, len(file.tokens)) == starts(case)


def starts(case: Case) -> list[int]:
    """Positions at which documents begin."""
    sizes = [sum(map(len, document)) for document in case.documents]
    return np.cumsum([0, *sizes[:-1]]).tolist()


@pytest.mark.parametrize("name", FIXTURES)
def test_what_megatron_wrote_once_is_read(name: str) -> None:
    assert_holds(TokenFile.open(HERE / name), CASES[name])


@pytest.mark.parametrize("name", FIXTURES)
def test_what_is_kept_is_what_megatron_writes(name: str, megatron: tuple[Path, object]) -> None:
    for suffix in (".bin", ".idx"):
        assert (HERE / f"{name}{suffix}").read_bytes() == (megatron[0] / f"{name}{suffix}").read_bytes()


@pytest.mark.parametrize("name", [*IDS, "several", "modes"])
def test_what_megatron_writes_is_read(name: str, megatron: tuple[Path, object]) -> None:
    assert_holds(TokenFile.open(megatron[0] / name), CASES[name])
    assert verify(megatron[0] / name, 2**63).documents == len(CASES[name].documents)


@pytest.mark.parametrize("name", IDS)
def test_our_bytes_are_megatrons(name: str, ours: Path, megatron: tuple[Path, object]) -> None:
    for suffix in (".bin", ".idx"):
        assert (ours / f"{name}{suffix}").read_bytes() == (megatron[0] / f"{name}{suffix}").read_bytes()


def test_what_we_write_is_read_by_megatron(ours: Path, megatron: tuple[Path, dict[str, dict[str, object]]]) -> None:
    found = megatron[1]
    for name in IDS:
        case = CASES[name]
        assert found[name] == {"dtype": name, "sequences": case.sequences, "boundaries": case.boundaries}
    cut = [[7, 8], [9, 10], [11, 12], [13, 14], [15, 16], [70_000]]
    assert found["cut"] == {"dtype": "int32", "sequences": cut, "boundaries": [0, 2, 3, 5, 6]}
    assert found.keys() == {*IDS, "cut"}


def test_files_of_several_dtypes_blend(megatron: tuple[Path, object], config: Config) -> None:
    config.data.source, config.tokenizer = "tokens", "bpe"
    config.data.path = [str(megatron[0] / name) for name in ("uint8", "int64", "several")]
    config.data.validation_fraction, config.train.seq_length, config.model.vocab_size = 0.0, 2, 2**63
    data = open_data(config, prepare(config))
    rows, parts, _ = data.train.read(np.arange(data.train.without_repeats()))
    assert set(parts.tolist()) == {0, 1, 2}
    held = [CASES[name].tokens for name in ("uint8", "int64", "several")]
    for row, part in zip(rows.tolist(), parts, strict=True):
        assert any(held[part][at : at + 3] == row for at in range(len(held[part])))
