"""What `pip install` puts on a machine works without the checkout: all defaults and commands are in it."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from megalite import __version__
from megalite.commands.dispatch import COMMANDS
from megalite.config.overrides import CONF

ROOT = Path(__file__).parents[1]
SMALL = ["device=cpu", "tokenizer=byte", "data=text", "data.path=a.txt", "model.num_layers=1", "model.hidden_size=32"]
SMALL += ["model.num_attention_heads=4", "train.seq_length=16", "train.global_batch_size=2", "train.sample_tokens=0"]
Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a program of an environment with megalite's wheel, in a folder with a text far from the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=120)
    venv.create(folder / "env", with_pip=False)
    programs = folder / "env" / "bin"
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    # The requirements, but not the checkout: .pth files of a folder that is only listed are not read.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    install = [*pip, "--python", str(programs / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, str(next(folder.glob("*.whl")))], check=True, timeout=120)
    (folder / "a.txt").write_text("A tree stands by the river.\n" * 400)

    def started(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        command = ["env", program, *words]  # found by PATH
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return started


def test_what_tests_need_is_ranged_in_pyproject_as_it_is_pinned() -> None:
    """But for what something pinned brings along."""
    lines = (ROOT / "requirements-test.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    along = {re.split(r"[^\w.-]", need)[0].lower() for name in pinned for need in requires(name) or ()}
    ranged = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert pinned - {name.replace("-", "_") for name in along} - along <= {re.split("[=>]", each)[0] for each in ranged}


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= cited.keys()
    assert cited["version"] == __version__


def test_it_is_the_wheel_that_runs_and_it_has_all_defaults(start: Start) -> None:
    code = (
        "import megalite.config.overrides as c; print(c.CONF); print(*sorted(p.name for p in c.CONF.rglob('*.yaml')))"
    )
    folder, names = start("python", "-c", code).stdout.splitlines()
    assert folder.endswith("site-packages/megalite/conf")
    assert names.split() == sorted(path.name for path in CONF.rglob("*.yaml"))


def test_a_run_is_trained_reported_and_continued_with_the_command_that_it_tells(start: Start) -> None:
    done = start("megalite", "train", *SMALL, "run_dir=run", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "python -m megalite train device=cpu" in start("cat", "run/events.jsonl").stdout
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    ranks = start("python", *torchrun, "-m", "megalite", "train", *SMALL, "run_dir=run", "train.steps=3")
    assert ranks.returncode == 0, ranks.stderr
    assert start("megalite", "report", "run").stdout == "run/report.html\n"


def test_plans_need_no_run(start: Start) -> None:
    assert "holds at most" in start("megalite", "plan", "schedule", "parallel.pp=2").stdout


def test_the_list_of_commands_and_a_command_that_there_is_not(start: Start) -> None:
    listed = start("megalite").stdout
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert start("megalite", "--help").stdout == listed
    assert start("megalite", "plan", "--help").stdout == listed
    assert start("megalite", "--version").stdout == f"megalite {__version__}\n"
    assert "fix: train, prepare, evaluate" in start("megalite", "trian").stderr
    refused = start("megalite", "plan", "ponies")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "command='plan ponies'" in refused.stderr
    assert "plan ranks" in refused.stderr
    whole = start("megalite", "plan", "schedule", "parallel.pp=2", "train.global_batch_size=4")
    assert "rank 1" in whole.stdout
    assert start("megalite", "schedule", "parallel.pp=2", "train.global_batch_size=4").stdout == whole.stdout
