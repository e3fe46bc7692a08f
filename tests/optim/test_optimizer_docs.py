"""docs/optimizer.md and buffers.md say what the code says: outputs are the commands', defaults the schema's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config.settings import SETTINGS, yaml_value

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("optimizer.md", "buffers.md"))
OF_ADAMW = {"lr", "weight_decay", "betas", "eps", "clip_grad"}  # docs/configuration.md has these
COMMANDS = {
    "memory": re.compile(r"python - <<'END'\n.*bytes_of_element", re.DOTALL),
    "buffers": re.compile(r"python -m megalite plan buffers .* --dp 2$"),
}


def shown(pattern: re.Pattern[str]) -> tuple[str, str]:
    """The command of the page that fits the pattern, and what is shown below it: a block or a table."""
    blocks = re.findall(r"```bash\n(.*?)\n```\n\n(?:```\n(.*?)\n```|((?:\|[^\n]*\n)+)|)", PAGE, re.DOTALL)
    (found,) = [(command, block or table) for command, block, table in blocks if pattern.match(command)]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_what_follows_a_command_is_its_output(name: str) -> None:
    command, output = shown(COMMANDS[name])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert output.splitlines() == ran.stdout.splitlines(), f"docs/buffers.md must show:\n{ran.stdout}"


def test_the_table_of_settings_is_the_schema_s() -> None:
    rows = dict(re.findall(r"^\| `optimizer\.([\w.]+)` \| `(.*?)` \|", PAGE, re.MULTILINE))
    settings = {each.leaf: yaml_value(each.default) for each in SETTINGS.values() if each.group == "optimizer"}
    assert rows == {leaf: default for leaf, default in settings.items() if leaf not in OF_ADAMW}


def test_every_file_and_setting_that_is_named_exists() -> None:
    for name in re.findall(r"`optimizer\.([\w.]+)", PAGE):
        assert f"optimizer.{name}" in SETTINGS
    for path in re.findall(r"`((?:megalite|tests|scripts)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
