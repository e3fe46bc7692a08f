"""Scripts are starters: each runs from a checkout that is not installed, wherever it is called from."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for path in [ROOT / "pretrain_gpt.py", *ROOT.glob("scripts/*.py")] if "__main__" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_needs_no_installed_megalite(script: Path, tmp_path: Path) -> None:
    # -S: no .pth files, so what pip install --editable leaves does not count
    command = [sys.executable, "-S", str(script), "--help"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert script.name in done.stdout
