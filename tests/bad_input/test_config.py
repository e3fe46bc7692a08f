"""Settings that cannot be, whatever machine they are given on; tests/config has a row for each rule."""

import tomllib

import pytest

from megalite.config.machine_rules import OLDEST_TORCH
from tests.bad_input.launching import SMALL, Row, Scene, check, file
from tests.train.runs import ROOT


def text_with_a_run_inside(scene: Scene) -> None:
    file("books/a.txt", b"some text " * 90)(scene)


def gpu_without_bf16(scene: Scene) -> None:
    import torch

    scene.patch.setattr("megalite.train.build.choose_device", lambda *_: torch.device("cuda", 0))
    scene.patch.setattr("megalite.launch.device._has_fast_bf16", lambda _: False)
    scene.patch.setattr(torch.cuda, "get_device_name", lambda _: "an old card")


ROWS = [
    Row(
        "bf16 where the device lacks it",
        "precision=bf16",
        ["precision='bf16': an old card cannot multiply bf16", "precision=fp32"],
        gpu_without_bf16,
    ),
    Row(
        "references in a circle, and one to a whole group",
        "lr.schedule=wsd train.steps=${lr.decay_steps} lr.decay_steps=${train.steps} train.sample_prompts=${data}",
        ["3 problems", "train.steps='${lr.decay_steps}': Recursive", "train.sample_prompts='${data}': "],
    ),
    Row(
        "groups of the optimizer without a parameter",
        "optimizer.groups=[{match:'*.routr.*',lr:0.1x},{match:'*',lr:3e-4},{match:'*norm*',lr:3e-4}]",
        [
            *("2 problems", "optimizer.groups='*.routr.*': matches no parameter of the model", "fix: match: "),
            "optimizer.groups='*norm*': matches only parameters that earlier groups have",
        ],
    ),
    Row(
        "run_dir is among the data",
        "data=text data.path=books run_dir=books/run",
        ["run_dir='books/run': the run would write into its own data, data.path=books", "run_dir=PATH elsewhere"],
        text_with_a_run_inside,
    ),
    Row(
        "the default run_dir is among the data",
        "data=text data.path=.",
        ["run_dir=", "runs", "write into its own data, data.path=.", "data.path='*.txt'"],
        file("a.txt", b"some text " * 90),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_config_is_refused(row: Row, scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, scene, capfd, SMALL)


def test_the_oldest_torch_is_that_of_the_package() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, OLDEST_TORCH))}" in wanted
