"""conf/ and docs/configuration.md say what the schema says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megalite.config.document import WHOLE, generated_files, stale_files
from megalite.config.settings import GROUPS, SETTINGS, typed_settings, yaml_value

ROOT = Path(__file__).parents[2]


def test_the_written_files_are_current() -> None:
    assert [str(path) for path in stale_files(ROOT)] == [], "run scripts/configuration_docs.py --write"


def test_check_fails_when_a_file_is_stale(tmp_path: Path) -> None:
    for folder in ("conf", "docs", "scripts", "megalite"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(tmp_path / "scripts" / "configuration_docs.py")]
    assert subprocess.run([*command, "--check"], check=False, capture_output=True).returncode == 0
    path = tmp_path / "conf" / "train" / "default.yaml"
    path.write_text(path.read_text().replace("seq_length: 256", "seq_length: 257"))
    stale = subprocess.run([*command, "--check"], check=False, capture_output=True, text=True)
    assert stale.returncode == 1
    assert "conf/train/default.yaml" in stale.stdout
    subprocess.run([*command, "--write"], check=True, capture_output=True)
    assert subprocess.run([*command, "--check"], check=False, capture_output=True).returncode == 0


def test_every_setting_is_documented_with_its_meaning_and_default() -> None:
    text = generated_files(ROOT)[ROOT / "docs" / "configuration.md"]
    for setting in SETTINGS.values():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{setting.name}` |")]
        assert f"`{yaml_value(setting.default)}`" in row
        assert setting.meaning in row.replace("\\|", "|").replace("\\<", "<")
    for preset in (path.stem for path in (ROOT / "conf" / "model").glob("*.yaml") if path.stem != "default"):
        assert f"`model={preset}`" in text


def test_generated_defaults_read_back_as_the_schemas() -> None:
    for group in GROUPS:
        text = generated_files(ROOT)[ROOT / "conf" / group / "default.yaml"]
        assert text.startswith(WHOLE)
        assert OmegaConf.create(text) == typed_settings()[group]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1e-8, "1.0e-8"), (2.5e-07, "2.5e-7"), (0.1, "0.1"), ([0.9, 0.95], "[0.9,0.95]")],
)
def test_values_are_written_as_yaml_reads_them(value: object, text: str) -> None:
    assert yaml_value(value) == text
    assert OmegaConf.create(f"x: {text}").x == value
