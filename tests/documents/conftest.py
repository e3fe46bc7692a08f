"""What the tests of this folder share."""

from pathlib import Path

import pytest

from tests.documents.commands import copy_repository
from tests.warm import warm_python


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as a new user has it."""
    folder = tmp_path_factory.mktemp("clone") / "megalite"
    copy_repository(folder, warm_python())
    return folder
