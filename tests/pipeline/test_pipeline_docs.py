"""docs/pipeline.md says what the code says: output and pictures are those of the commands above them, defaults are the
schema's, and the schedule that is shown as an example is the real one."""

import inspect
import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from megalite.config.layout import STAGE_NAMES
from megalite.config.settings import SETTINGS, yaml_value
from megalite.pipeline import schedules
from megalite.pipeline.actions import Action
from megalite.pipeline.transfers import Instruction, Wait, instructions
from tests.pipeline.shapes import schedule

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
TABLE = re.search(r"```bash\n(python -m megalite plan schedule [^\n]*)\n```\n\n```\n(.*?)\n```", PAGE, re.DOTALL)
DRAWN = re.findall(r"^(python -m megalite plan schedule .*\\\n.*) --picture (docs/pictures/\S+)$", PAGE, re.MULTILINE)


def output_of(command: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    how: dict[str, Any] = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(["bash", "-c", command], check=False, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_follows_a_command_is_its_output() -> None:
    assert TABLE is not None
    command, shown = TABLE.groups()
    assert output_of(command).splitlines() == shown.splitlines()


def words_of(one: Instruction) -> str:
    if isinstance(one, Action):
        return str(one)
    transfer = one.transfer if isinstance(one, Wait) else one
    what = f"{transfer.role} {'activation' if transfer.direction == 'forward' else 'gradient'} {transfer.microbatch}"
    return f"    wait: {what}" if isinstance(one, Wait) else f"    {what}"


def test_the_instructions_that_are_shown_are_those_of_1f1b() -> None:
    programs = [map(words_of, of_rank) for of_rank in instructions(schedule("1f1b", 2, 3))]
    lines = [f"{one:<36}{other}".rstrip() for one, other in zip_longest(*programs, fillvalue="")]
    assert "\n".join([f"{'rank 0':<36}rank 1", "", *lines]) in PAGE


def test_there_is_a_picture_of_every_schedule() -> None:
    assert {path for _, path in DRAWN} == {f"docs/pictures/pipeline-{name}.svg" for name in schedules.SCHEDULES}
    assert all(f"]({path.removeprefix('docs/')})" in PAGE for _, path in DRAWN)


@pytest.mark.parametrize(("command", "path"), DRAWN, ids=[path for _, path in DRAWN])
def test_a_picture_is_what_its_command_draws(command: str, path: str, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    output_of(f"{command} --picture {drawn}")
    assert drawn.read_bytes() == (ROOT / path).read_bytes(), f"draw {path} again"


def test_the_table_of_settings_is_the_schema_s() -> None:
    rows = dict(re.findall(r"^\| `((?:parallel|train)\.\w+)` \| `(.*?)` \|", PAGE, re.MULTILINE))
    names = {name for name in STAGE_NAMES.values() if name.startswith("parallel.")}
    names |= {"parallel.schedule", "parallel.microbatch_group_size", "train.record_pipeline"}
    assert rows == {name: yaml_value(SETTINGS[name].default) for name in names}


def test_the_example_of_a_schedule_is_a_whole_one() -> None:
    assert f"```python\n{inspect.getsource(schedules.gpipe)}```\n" in PAGE


def test_every_file_setting_and_section_that_is_named_exists() -> None:
    for group, name in re.findall(r"(?<![\w.])(parallel|train|model)\.([a-z]\w+)\b(?!\()", PAGE):
        assert f"{group}.{name}" in SETTINGS, name
    for path in re.findall(r"`((?:megalite|tests|scripts)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for link, section in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", PAGE):
        target = ROOT / "docs" / link
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
