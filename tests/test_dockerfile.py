"""The Dockerfile can be read by what rehearses it, is pinned, and ends as nobody in particular."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from torch.distributed.run import get_args_parser

from megalite.config.compose import load_config

ROOT = Path(__file__).parents[1]
REHEARSAL = ROOT / "tests" / "cluster" / "dockerfile_steps.sh"


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """(instruction, the rest) of every step, as the rehearsal reads them."""
    listed = subprocess.run([REHEARSAL, "--list"], capture_output=True, text=True, check=True)
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in listed.stdout.splitlines()]


def test_the_rehearsal_knows_every_step(steps: list[tuple[str, str]]) -> None:
    known = set(re.findall(r"(?m)^        ([A-Z]+)\)", REHEARSAL.read_text()))
    assert {name for name, _ in steps} <= known
    assert "RUN" in known


def test_the_base_is_pinned_and_the_user_is_not_root(steps: list[tuple[str, str]]) -> None:
    assert re.fullmatch(r"BASE=debian:\w+-\d{8}-slim", steps[0][1])
    users = [rest for name, rest in steps if name == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert [name for name, _ in steps].index("USER") > max(n for n, (name, _) in enumerate(steps) if name == "RUN")


LEFT_OUT = {"requirements-test.txt", "requirements-trackio.txt"}  # trackio wants another pillow than TensorBoard's


def test_arguments_go_to_megalite_and_what_is_for_tests_is_not_installed(steps: list[tuple[str, str]]) -> None:
    last = {name: json.loads(rest) for name, rest in steps if name in ("ENTRYPOINT", "CMD")}
    assert last == {"ENTRYPOINT": ["megalite"], "CMD": ["train"]}
    installed = re.findall(r"requirements[\w-]*\.txt", " ".join(rest for name, rest in steps if name == "RUN"))
    assert set(installed) == {path.name for path in ROOT.glob("requirements*.txt")} - LEFT_OUT


def test_what_is_copied_is_there_and_not_ignored(steps: list[tuple[str, str]]) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs", "**/__pycache__"} <= set(ignored), "no environment and no result gets into it"
    for _, rest in (step for step in steps if step[0] == "COPY"):
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists()
            assert source not in ignored


def test_what_installs_the_requirements_has_all_that_it_reads(steps: list[tuple[str, str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    install = next(rest for name, rest in steps if name == "RUN" and "setup.sh" in rest)
    before = " ".join(rest for name, rest in steps[: steps.index(("RUN", install))] if name == "COPY").split()
    read = ["pyproject.toml", project["project"]["readme"], project["tool"]["hatch"]["version"]["path"]]
    assert {*read, *re.findall(r"\S+\.(?:sh|txt)", install.replace("'", " "))} <= {*before}


def test_the_cuda_image_named_for_it_is_of_the_cuda_that_the_pinned_torch_brings() -> None:
    brings = {"2.13.0": "13.0"}  # what the wheel on PyPI requires: cuda-toolkit 13.0.3
    [pinned] = re.findall(r"(?m)^torch==(\S+)$", (ROOT / "requirements.txt").read_text())
    texts = [(ROOT / name).read_text() for name in ("Dockerfile", "docs/docker.md")]
    assert {tag for text in texts for tag in re.findall(r"nvidia/cuda:(\d+\.\d+)\.", text)} == {brings[pinned]}
    assert torch.version.cuda in (None, brings[pinned]) or torch.__version__.partition("+")[0] != pinned


def test_compose_starts_one_job_on_two_nodes() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    words = {name: [*service["entrypoint"], *service["command"]] for name, service in services.items()}
    assert words["node0"] == words["node1"], "nodes of an elastic rendezvous are equal"
    script = words["node0"].index("pretrain_gpt.py")
    job = get_args_parser().parse_args(words["node0"][1:])
    assert (job.nnodes, job.nproc_per_node) == ("2", "2")
    assert job.rdzv_endpoint.partition(":")[0] in {service["hostname"] for service in services.values()}
    config = load_config(words["node0"][script + 1 :], 4)
    folders = [volume.partition(":")[2] for volume in services["node0"]["volumes"]]
    assert config.run_dir == str(Path.cwd() / "runs" / "compose")
    assert folders == ["/megalite/runs", "/cache"], "where the image writes runs and tokens"
    assert services["node1"]["volumes"] == services["node0"]["volumes"]
    node = services["node0"]
    assert int(node["stop_grace_period"].rstrip("s")) > int(node["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 30
