"""Every command that README and docs print runs exactly as printed, and ends as they say."""

from pathlib import Path

import pytest

from tests.documents.commands import COMMAND, LAYOUTS, NEEDS_MORE, PAGES, blocks, check, commands, run

# What they start, tests/test_benchmark*.py and tests/commands/test_sweep.py start in every run.
LONG = ("performance.md", "sweeps.md")
HERE = [
    pytest.param(page, id=page.name, marks=pytest.mark.long if page.name in LONG else ())
    for page in PAGES
    if commands(page) and page not in LAYOUTS
]


@pytest.mark.parametrize("page", HERE)
def test_the_commands_of_a_page_run_as_printed(page: Path, clone: Path) -> None:
    check(page, clone)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_stands_in_a_block_that_nobody_runs(page: Path) -> None:
    """Unless the block says that it is `text`."""
    tried = {block for block, _ in commands(page)}
    others = [block for block in blocks(page) if block not in tried and COMMAND.search(block.text)]
    assert [block.language for block in others] == ["text"] * NEEDS_MORE.get(page.name, 0), others


def test_a_command_that_fails_is_noticed(clone: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\npython pretrain_gpt.py train.step=3\n```\n\n```bash\npython no_such_script.py\n```\n")
    assert [run(block, clone).returncode == status for block, status in commands(page)] == [False, False]
