"""Checkpoints that are damaged, forged, of another kind, or of another run.

All rows meet one run of two steps, each of them saved; a row that damages a checkpoint damages both, since a single
one is passed over (tests/checkpoint/test_damage.py). What each kind of damage does to one file is tested there, too.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from megalite.checkpoint.manifest import Manifest, digest
from tests.bad_input.launching import SMALL, TOKENS, Row, Scene, check, copy_of_run, write_corpus
from tests.checkpoint import test_damage as damage

RUN = [*SMALL, *TOKENS, "run_dir=run"]
NONE_CAN_BE_READ = ["2 problems", "run/checkpoints/step-00000002", "no checkpoint of this run can be read", "copy"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its corpus and its export."""
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert pretrain_gpt.main([*RUN, "train.steps=2", "checkpoint.interval=1"]) == 0
        assert Row("", "run exported", [], command="export").run([]) == 0
    return folder


@pytest.fixture
def run(finished: Path, launch_folder: Path) -> Path:
    return copy_of_run(finished, launch_folder)


def of_both(harm: Callable[[Path], object]) -> Callable[[Scene], None]:
    """Do it to each checkpoint of the run, the older one first."""

    def arrange(scene: Scene) -> None:
        for checkpoint in sorted((scene.folder / "run" / "checkpoints").iterdir()):
            harm(checkpoint)

    return arrange


def flip_a_bit(checkpoint: Path) -> None:
    data = checkpoint / "rank-00000.safetensors"
    data.write_bytes(damage.flipped(data.read_bytes(), 8 * 3000))


def point_outside(checkpoint: Path) -> None:
    damage.rewrite_manifest(
        checkpoint, lambda found: replace(found, files={**found.files, "../../lock": found.files["state.json"]})
    )


def call_it_another_run_s(checkpoint: Path) -> None:
    damage.rewrite_manifest(
        checkpoint, lambda found: replace(found, about={**found.about, "run_id": "0123456789abcdef"})
    )


def lose_half_of_a_tensor(checkpoint: Path) -> None:
    """In the manifest, behind a right hash."""

    def change(found: Manifest) -> Manifest:
        name = "master.embedding.word.weight"
        return replace(found, tensors={**found.tensors, name: found.tensors[name]._replace(boxes=[])})

    damage.rewrite_manifest(checkpoint, change)


def forget_the_setting(name: str) -> Callable[[Scene], None]:
    """As if the run was of a version without it, of which nothing is known, and nothing is loaded that does not fit."""

    def harm(checkpoint: Path) -> None:
        state = json.loads((checkpoint / "state.json").read_bytes())
        group, _, leaf = name.rpartition(".")
        del state["config"][group][leaf]
        content = json.dumps(state).encode()
        (checkpoint / "state.json").write_bytes(content)
        entry = {"state.json": (len(content), digest(content))}
        damage.rewrite_manifest(checkpoint, lambda found: replace(found, files={**found.files, **entry}))

    return of_both(harm)


def folder_of_another_program(scene: Scene) -> None:
    """A folder of tensors without our manifest."""
    (scene.folder / "theirs" / "checkpoints").mkdir(parents=True)
    step = scene.folder / "run" / "checkpoints" / "step-00000001"
    theirs = shutil.copytree(step, scene.folder / "theirs" / "checkpoints" / step.name)
    (theirs / "manifest.json").unlink()
    (theirs / "state.json").unlink()


ROWS = [
    Row(
        "a step that there is not",
        "run out --step 7",
        ["step=7: there is no checkpoint of it", "those there are: 1, 2"],
        command="export",
    ),
    Row("a flipped bit", "", [*NONE_CAN_BE_READ, "rank-00000.safetensors is damaged"], of_both(flip_a_bit)),
    Row(
        "a manifest that points outside",
        "",
        [*NONE_CAN_BE_READ, "names '../../lock', which is not a file of the checkpoint's own folder"],
        of_both(point_outside),
    ),
    Row(
        "a later format",
        "",
        ["it has format 3; this megalite reads format 2", "go on with the megalite that wrote it"],
        of_both(damage.write_later_format),
    ),
    Row(
        "a checkpoint of another program",
        "run_dir=theirs",
        ["run_dir='theirs': it holds checkpoints", "(there is no run.json)", "a new folder"],
        folder_of_another_program,
    ),
    Row(
        "a run as start weights",
        "run_dir=new checkpoint.init_from=run",
        ["checkpoint.init_from='run'", "the folder of a transformers model", "export", "a run goes on by run_dir"],
    ),
    Row(
        "another model",
        "model.hidden_size=32 model.num_layers=2 train.seq_length=8",
        [
            "model.hidden_size=32: the run in this folder was started with model.hidden_size=16",
            *("model.num_layers=1", "train.seq_length=16", "another run_dir"),
        ],
    ),
    Row(
        "start weights of another model",
        "run_dir=new checkpoint.init_from=exported model.hidden_size=32 model.num_layers=2",
        ["hidden_size=32: is another in the model of", "model.hidden_size=16", "num_layers=2"],
    ),
    Row(
        "a tensor more",
        "model.tie_embeddings=false",
        ["'3 differences': ", "master.head.weight is missing there and (", "of the run that wrote it"],
        forget_the_setting("model.tie_embeddings"),
    ),
    Row(
        "another precision",
        "precision=fp64",
        ["differences", "exp_avg.", "is (torch.float32, [", "there and (torch.float64, [", "precision of the run"],
    ),
    Row(
        "a checkpoint of another run",
        "",
        ["it is of run 0123456789abcdef, and the folder is that of run ", "copy the whole run folder"],
        of_both(call_it_another_run_s),
    ),
    Row(
        "a run where none is wanted",
        "resume=never",
        ["run_dir=", "holds a run already, and resume=never", "resume=auto to continue"],
    ),
    Row(
        "a tensor with a gap",
        "",
        [*NONE_CAN_BE_READ, "the parts of master.embedding.word.weight are not the whole tensor"],
        of_both(lose_half_of_a_tensor),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.usefixtures("run")
def test_a_bad_checkpoint_is_refused(row: Row, scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, scene, capfd, RUN)


@pytest.mark.usefixtures("run")
def test_the_run_itself_goes_on(launch_folder: Path) -> None:
    """What the rows start from is refused for nothing but what they do to it."""
    assert pretrain_gpt.main([*RUN, "train.steps=3"]) == 0
    assert (launch_folder / "run" / "checkpoints" / "step-00000003").is_dir()


def test_another_number_of_experts_than_the_checkpoint_s_is_refused(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    write_corpus(scene.folder)
    assert pretrain_gpt.main([*RUN, "model.moe.num_experts=4", "train.steps=1"]) == 0
    for experts in (8, 0):
        rule = f"model.moe.num_experts={experts}: the run in this folder was started with model.moe.num_experts=4"
        words = [rule, "set model.moe.num_experts=4, or another run_dir"]
        check(Row("", f"model.moe.num_experts={experts}", words), scene, capfd, RUN)
