"""The manifests for Kubernetes and the clouds start a training that megalite takes, and their schemas know each field.

Their packages are not among the requirements: pip install kubeflow-trainer-api skypilot.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.compose import load_config
from tests.bad_input.launching import write_corpus

SCRIPTS = Path(__file__).parents[2] / "scripts"
TRAIN_JOB = SCRIPTS / "kubernetes" / "trainjob.yaml"
SKY = SCRIPTS / "skypilot" / "pretrain.yaml"
RANKS = 16


def manifest(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def words_of(path: Path) -> list[str]:
    if path == TRAIN_JOB:
        trainer = manifest(path)["spec"]["trainer"]
        return [*trainer["command"], *trainer["args"]]
    return shlex.split(manifest(path)["run"].replace("\\\n", " ").splitlines()[-1])


@pytest.mark.parametrize("path", [TRAIN_JOB, SKY], ids=lambda path: path.name)
def test_what_it_starts_is_a_training(path: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    words = [word.replace("/data/web", f"{tmp_path}/corpus") for word in words_of(path)]
    words = [word.replace("/runs/", f"{tmp_path}/runs/") for word in words]
    assert "torchrun" in words
    config = load_config(words[words.index("pretrain_gpt.py") + 1 :], RANKS)
    assert config.run_dir == f"{tmp_path}/runs/llama3-8b"


def test_the_schema_of_a_trainjob_knows_every_field() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    written = manifest(TRAIN_JOB)
    job = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert job.spec.trainer.num_nodes == 2
    assert job.to_dict() == written, "what the schema does not know is dropped"


def test_skypilot_reads_its_file() -> None:
    sky = pytest.importorskip("sky", reason="needs skypilot")
    task = sky.Task.from_yaml(str(SKY))
    assert (task.name, task.num_nodes) == ("megalite", 2)
    with pytest.raises(ValueError, match="num_nodez"):
        sky.Task.from_yaml_config(manifest(SKY) | {"num_nodez": 2})
