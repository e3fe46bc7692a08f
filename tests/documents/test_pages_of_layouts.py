"""Every command of the pages about several ranks runs exactly as printed, and ends as they say.

A file of its own, so that it runs beside test_pages.py.
"""

from pathlib import Path

import pytest

from tests.documents.commands import LAYOUTS, check


@pytest.mark.parametrize("page", LAYOUTS, ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_printed(page: Path, clone: Path) -> None:
    check(page, clone)
