"""The manifests for Kubernetes and the clouds start a training that megalite takes, and the schema knows each field."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.compose import load_config
from tests.bad_input.launching import write_corpus

SCRIPTS = Path(__file__).parents[2] / "scripts"
TRAIN_JOB = SCRIPTS / "kubernetes" / "trainjob.yaml"
RUNTIME = SCRIPTS / "kubernetes" / "runtime.yaml"
SKY = SCRIPTS / "skypilot" / "pretrain.yaml"
RANKS = 16
PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


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


def test_the_schemas_of_a_trainjob_and_its_runtime_know_every_field() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    for path, model in ((TRAIN_JOB, models.TrainerV1alpha1TrainJob), (RUNTIME, models.TrainerV1alpha1TrainingRuntime)):
        written = manifest(path)
        assert model.from_dict(written).to_dict() == written, "what the schema does not know is dropped"


def test_the_pods_of_a_trainjob_have_what_it_counts_on() -> None:
    job, runtime = manifest(TRAIN_JOB)["spec"], manifest(RUNTIME)
    assert job["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (patience,) = (int(each["value"]) for each in job["trainer"]["env"] if each["name"] == PATIENCE)
    assert pod["terminationGracePeriodSeconds"] > patience
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert mounts.keys() == {"/runs", "/data", "/dev/shm"}
    assert {*mounts.values()} == volumes.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
