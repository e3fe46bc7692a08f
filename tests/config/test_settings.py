"""A config goes out by the names that users know, comes back by them, and is documented by them."""

import ast
import shutil
import subprocess
import sys
from functools import reduce
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, as_plain, leaves, value_of, with_values

ROOT = Path(__file__).parents[2]


def test_every_setting_is_written_read_and_changed_by_its_name() -> None:
    for name in SETTINGS:
        changed = with_values(Config(), {name: "other"})
        assert changed != Config()
        assert value_of(changed, name) == "other"
        plain = as_plain(changed)
        assert reduce(dict.__getitem__, name.split("."), plain) == "other"
        assert leaves(plain).keys() == SETTINGS.keys()
        assert with_values(Config(), leaves(yaml.safe_load(yaml.safe_dump(plain)))) == changed


def test_conf_and_the_docs_say_what_the_schema_says(tmp_path: Path) -> None:
    def run(action: str, folder: Path = tmp_path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(folder / "scripts" / "configuration_docs.py"), action]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    assert run("--check", ROOT).returncode == 0, "run scripts/configuration_docs.py --write"
    for folder in ("conf", "docs", "scripts", "megalite"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "conf" / "train" / "default.yaml"
    path.write_text(path.read_text().replace("seq_length: 256", "seq_length: 257"))
    stale = run("--check")
    assert (stale.returncode, "conf/train/default.yaml" in stale.stdout) == (1, True)
    assert run("--write").returncode == run("--check").returncode == 0


def test_hydra_and_omegaconf_are_used_by_their_public_names() -> None:
    for path in (ROOT / "megalite").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None) or ""
            for name in (f"{module}.{each}" if module else each for each in names):
                if name.split(".")[0] in ("hydra", "omegaconf"):
                    assert "._" not in name, f"{path.name}: {name}"
