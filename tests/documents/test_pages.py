"""Every command that README and docs print runs exactly as printed, and ends as they say."""

import re
import shlex
from pathlib import Path

import pytest

from megalite.config.compose import load_config
from tests.documents.commands import COMMAND, NEEDS_MORE, PAGES, blocks, check, commands, run

# Of these pages a plain run checks the settings of trainings. What else they start, other tests start in every run:
# sweeps, exports, schedules, buffers, verifications, reports, preparations, resumes in another layout.
TRAININGS = (
    *("data.md", "logging.md", "moe.md", "mup.md", "optimizer.md", "pipeline.md", "report.md", "tensor_parallel.md"),
    "training.md",
)
LONG = (
    *TRAININGS,
    "context_parallel.md",
    "huggingface.md",
    "performance.md",
    "performance_cpu.md",
    "scaling.md",
    "sweeps.md",
)
HERE = [
    pytest.param(page, id=page.name, marks=pytest.mark.long if page.name in LONG else ())
    for page in PAGES
    if commands(page)
]
TRAINING = re.compile(r"^(?:python|torchrun --standalone --nproc-per-node (\d)) pretrain_gpt\.py ([^$]+?)$", re.M)


@pytest.mark.parametrize("page", HERE)
def test_the_commands_of_a_page_run_as_printed(page: Path, clone: Path) -> None:
    check(page, clone)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in TRAININGS], ids=lambda page: page.name)
def test_the_settings_of_a_page_s_trainings_are_taken(page: Path) -> None:
    texts = [block.text.replace("\\\n", "") for block, status in commands(page) if status == 0]
    found = [at.groups() for text in texts for at in TRAINING.finditer(text) if "--cfg" not in at[0]]
    assert len(found) > 1
    for ranks, words in found:
        load_config(shlex.split(words, comments=True), int(ranks or 1))


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
