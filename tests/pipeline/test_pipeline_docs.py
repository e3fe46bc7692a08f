"""docs/pipeline.md says what the code says: output and pictures are those of the commands above them, defaults are the
schema's, and the schedule that is shown as an example is the real one."""

import inspect
import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from megalite.config.layout import STAGE_NAMES
from megalite.config.settings import SETTINGS, yaml_value
from megalite.pipeline import schedules
from megalite.pipeline.actions import Action
from megalite.pipeline.transfers import Instruction, Wait, instructions
from tests.pipeline.shapes import schedule

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
COMMANDS = {
    "table": r"python -m megalite plan schedule [^\n]*train.global_batch_size=4 train.micro_batch_size=1$",
}
DRAWN = re.findall(r"^(python -m megalite plan schedule .*\\\n.*) --picture (docs/pictures/\S+)$", PAGE, re.MULTILINE)


def ran(command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def shown(pattern: str) -> tuple[str, str]:
    """The command of the page that fits the pattern, and what is shown below it: a block or a table."""
    blocks = re.findall(r"```bash\n(.*?)\n```\n\n(?:```\n(.*?)\n?```|((?:\|[^\n]*\n)+)|)", PAGE, re.DOTALL)
    fits = re.compile(pattern, re.DOTALL)
    (found,) = [(command, block or table) for command, block, table in blocks if fits.match(command)]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_what_follows_a_command_is_its_output(name: str) -> None:
    command, output = shown(COMMANDS[name])
    done = ran(command)
    assert done.returncode == 0, done.stderr
    assert output.splitlines() == done.stdout.splitlines(), f"docs/pipeline.md must show:\n{done.stdout}"


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
    names = {path.removeprefix("docs/pictures/pipeline-").removesuffix(".svg") for _, path in DRAWN}
    assert names == {*schedules.SCHEDULES}
    for command, path in DRAWN:
        assert f"parallel.schedule={path.removeprefix('docs/pictures/pipeline-').removesuffix('.svg')} " in command
        assert f"]({path.removeprefix('docs/')})" in PAGE


@pytest.mark.parametrize(("command", "path"), DRAWN, ids=[path for _, path in DRAWN])
def test_a_picture_is_what_its_command_draws(command: str, path: str, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    done = ran(f"{command} --picture {drawn}")
    assert done.returncode == 0, done.stderr
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
