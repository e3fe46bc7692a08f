"""What runs learn from: each module of tests has a text, and a cache beside it, of its own."""

from pathlib import Path

import pytest

from tests.train.runs import write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the text and takes runs."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    return folder / "text.txt"
