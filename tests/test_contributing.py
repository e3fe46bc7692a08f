"""The worked examples of CONTRIBUTING.md fit the code as it is: applied to a copy of it, they work."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.warm import warm_python

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
WORK = """
from pathlib import Path
from megalite.config.settings import SETTINGS
from megalite.prepare.reading import pieces
from megalite.prepare.sources import Source
from megalite.pipeline.checker import check
from megalite.config.schedule_rules import ScheduleRequest
from megalite.pipeline.schedules import build_schedule

for pp, microbatches in ((1, 3), (2, 3), (4, 8), (8, 4)):
    assert check(build_schedule(ScheduleRequest("eager", pp, microbatches))) == []
assert "eager" in SETTINGS["parallel.schedule"].choices
assert "relu2" in SETTINGS["model.activation"].choices
Path("mails.mbox").write_text("From a\\nSubject: one\\n\\nfirst\\n\\nFrom b\\n\\nsecond\\n")
assert [text.strip() for text in pieces(*Source("text", ("mails.mbox",)).plan()) if text] == ["first", "second"]
"""


def changes() -> Iterator[tuple[str, str, str]]:
    """(file, text that is there, text that takes its place) of every place of every example."""
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"(?m)^--- ", block)[1:]:
            name, *places = re.split(r"(?m)^@@\n", part)
            for place in places:
                lines = [line or " " for line in place.splitlines()]
                before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
                yield name.strip(), before, after


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The code with all examples applied."""
    for name in ("megalite", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in changes():
        text = (tmp_path / name).read_text()
        assert text.count(before) == 1, f"CONTRIBUTING.md speaks of a place that {name} does not have:\n{before}"
        (tmp_path / name).write_text(text.replace(before, after))
    return tmp_path


def test_the_examples_work(copy: Path) -> None:
    assert len({name for name, _, _ in changes()}) == 7
    for name in {name for name, _, _ in changes()}:
        compile((copy / name).read_text(), name, "exec")
    done = subprocess.run([warm_python(), "-c", WORK], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_what_the_page_prints_works_on_the_examples(copy: Path) -> None:
    """But for the tests, which take minutes."""
    for name in ("conf", "docs", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "mails.mbox").write_text("From a\nSubject: one\n\nfirst\n\nFrom b\n\nsecond\n")
    lines = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    lines = [line.partition("  #")[0].strip() for line in lines]
    tried = [line for line in lines if "pytest" not in line]
    assert len(tried) == 6
    for line in tried:
        done = subprocess.run([warm_python(), *line.split()[1:]], cwd=copy, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if "megalite prepare" in line:
            assert "2 documents" in done.stdout
    check = [warm_python(), "scripts/configuration_docs.py", "--check"]
    assert subprocess.run(check, cwd=copy, check=False).returncode == 0
    assert "relu2" in (copy / "docs" / "configuration.md").read_text()


def test_the_steps_before_a_change_is_sent_are_those_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    steps = [step.strip() for line in block.splitlines() for step in line.split("&&")]
    assert len(steps) == 5
    assert [step for step in steps if step not in ci] == []


def test_the_mathematics_of_the_model_option(copy: Path) -> None:
    spec = importlib.util.spec_from_file_location("changed", copy / "megalite" / "config" / "activations.py")
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    sys.modules["changed"] = changed  # dataclasses look for it
    spec.loader.exec_module(changed)
    x = torch.tensor([-1.0, 3.0])
    assert changed.ACTIVATIONS["relu2"](x).tolist() == [0.0, 9.0]
    assert torch.equal(changed.ACTIVATIONS["gelu"](x), torch.nn.functional.gelu(x))


def test_the_files_that_the_page_names_are_there() -> None:
    names = re.findall(r"`((?:megalite|tests|scripts|benchmarks|conf|docs)/[\w./]+\w)`", PAGE)
    names += re.findall(r"\]\((docs/[\w./]+)", PAGE)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []
