"""What a checkout starts needs no installation: scripts wherever they are called from, commands in its folder."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megalite.commands.dispatch import COMMANDS

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "pretrain_gpt.py", *ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]
SCRIPTS = [path for path in FILES if "__main__" in path.read_text()]


def helped(cwd: Path, *words: str) -> str:
    """What `--help` prints without an installed megalite."""
    # -S: no .pth files, so what pip install --editable leaves does not count
    command = [sys.executable, "-S", *words, "--help"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_needs_no_installed_megalite(script: Path, tmp_path: Path) -> None:
    assert script.name in helped(tmp_path, str(script))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_a_command_needs_no_installed_megalite(name: str) -> None:
    shown = helped(ROOT, "-m", "megalite", *name.split())
    assert f"usage: megalite {name}" in shown
    assert f"python -m megalite {name} " in shown
