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
    Row("a slip", "optimzer.lr=1 +model.foo=1", ["2 problems", "optimzer.lr=1", "did you mean optimizer.lr=1"]),
    Row(
        "text for a number",
        "optimizer.lr=3e-4x train.steps=abc",
        ["2 problems", "optimizer.lr='3e-4x': must be a number", "optimizer.lr=0.001", "'abc'", "whole number"],
    ),
    Row("a negative learning rate", "optimizer.lr=-1", ["optimizer.lr=-1.0", "above 0"]),
    Row("a learning rate of nan", "optimizer.lr=nan", ["optimizer.lr=nan", "must be finite"]),
    Row(
        "numbers beyond all bounds",
        f"optimizer.lr=1{'0' * 400} parallel.timeout_s=1e300 train.steps=100000000",
        ["3 problems", "optimizer.lr=1000", "at most 31536000", "at most 99999999"],
    ),
    Row(
        "a world that the layout does not divide",
        "parallel.tp=2 parallel.pp=2 model.num_layers=2",
        ["world size=6: not a multiple of parallel.tp=2 x parallel.cp=1 x parallel.pp=2", "world size=4 or 8"],
        ranks=6,
    ),
    Row(
        "a schedule that does not go with what is compiled",
        "parallel.pp=2 parallel.vpp=3 parallel.schedule=zb-h1 train.compile=true",
        [
            "4 problems",
            "1 layer cannot be divided over 6 stages",
            "model.num_layers=6 or 12",
            "schedule='zb-h1'",
            "train.compile=True",
        ],
    ),
    Row(
        "no interval and no checkpoint",
        "checkpoint.interval=-1 checkpoint.keep=0",
        ["2 problems", "checkpoint.interval=-1: must be at least 0", "checkpoint.keep=0: must be at least 1"],
    ),
    Row(
        "bf16 where the device lacks it",
        "precision=bf16",
        ["precision='bf16': an old card cannot multiply bf16", "precision=fp32"],
        gpu_without_bf16,
    ),
    Row(
        "a loss scale without fp16",
        "optimizer.initial_loss_scale=128",
        ["optimizer.initial_loss_scale=128.0", "has no effect with precision=fp32", "precision=fp16"],
    ),
    Row(
        "shares and rates outside their range",
        "model.dropout=1 model.attention_dropout=-0.1 optimizer.betas=[0.9,1.0] optimizer.eps=0",
        ["4 problems", "model.dropout=1.0", "below 1", "attention_dropout=-0.1", "betas=[0.9, 1.0]", "eps=0.0: must"],
    ),
    Row(
        "a length in tokens beside one in steps",
        "train.tokens=1000000",
        ["train.tokens=1000000: unknown setting", "train.steps=N", "train.global_batch_size x train.seq_length"],
    ),
    Row(
        "a class to be made",
        "model._target_=torch.load",
        ["model._target_='torch.load': unknown setting", "model.activation=swiglu"],
    ),
    Row("nothing to read", "data=text", ["data.path=null", "data=text needs to be told", "as data.path=FOLDER"]),
    Row(
        "values left open",
        "train.steps=??? data=text data.path=???",
        [
            "2 problems",
            "train.steps='???'",
            "train.steps=200",
            "data.path='???': Missing mandatory value",
        ],
    ),
    Row(
        "a reference to nothing",
        "train.steps=${train.stepps}",
        ["train.steps='${train.stepps}'", "'train.stepps' not found", "train.steps=200"],
    ),
    Row(
        "references in a circle, and one to a whole group",
        "lr.schedule=wsd train.steps=${lr.decay_steps} lr.decay_steps=${train.steps} train.sample_prompts=${data}",
        ["2 problems", "train.steps='${lr.decay_steps}': Recursive", "train.sample_prompts='${data}': "],
    ),
    Row(
        "an environment variable that is not set",
        "log.wandb_entity=${oc.env:MEGALITE_TEAM}",
        ["log.wandb_entity=", "Environment variable 'MEGALITE_TEAM' not found"],
    ),
    Row("a preset that there is not", "model=gtp2", ["model='gtp2'", "model=gpt2 is the nearest", "llama3_8b"]),
    Row("a choice", "model.norm=rmsnrom", ["'rmsnrom'", "model.norm=rmsnorm is the nearest", "layernorm"]),
    Row("a secret", "+wandb.api_key=CLISECRET", ["wandb.api_key", "secret", "WANDB_API_KEY"]),
    Row(
        "run_dir is a file", "run_dir=taken", ["run_dir='taken'", "Not a directory", "a new folder"], file("taken", b"")
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
    Row("a negative seed", "seed=-1", ["seed=-1: must be at least 0, at most 9223372036854775807"]),
    Row("a seed of 64 bits", "seed=9223372036854775808", ["seed=9223372036854775808: must be at least 0"]),
    Row(
        "a float for a whole number, a number for yes or no",
        "train.steps=1e3 model.bias=2",
        ["2 problems", "train.steps=1000.0", "whole number", "model.bias=2", "true or false"],
    ),
    Row(
        "sizes that a sequence does not divide over",
        "parallel.tp=2 parallel.cp=2 parallel.vpp=2 train.seq_length=100",
        ["3 problems", "train.seq_length=100", "not a multiple of 8", "parallel.pp=1 has none"],
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_config_is_refused(row: Row, scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, scene, capfd, SMALL)


def test_the_oldest_torch_is_that_of_the_package() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, OLDEST_TORCH))}" in wanted
