"""Numbers 1 to 30: settings that cannot be, whatever machine they are given on."""

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
    Row(1, "a slip", "optimzer.lr=1 +model.foo=1", ["2 problems", "optimzer.lr=1", "did you mean optimizer.lr=1"]),
    Row(
        2,
        "text for a number",
        "optimizer.lr=3e-4x train.steps=abc",
        ["2 problems", "optimizer.lr='3e-4x': must be a number", "optimizer.lr=0.001", "'abc'", "whole number"],
    ),
    Row(3, "a negative learning rate", "optimizer.lr=-1", ["optimizer.lr=-1.0", "above 0"]),
    Row(3, "a learning rate of nan", "optimizer.lr=nan", ["optimizer.lr=nan", "must be finite"]),
    Row(
        3,
        "numbers beyond all bounds",
        f"optimizer.lr=1{'0' * 400} parallel.timeout_s=1e300 train.steps=100000000",
        ["3 problems", "optimizer.lr=1000", "at most 31536000", "at most 99999999"],
    ),
    Row(
        4,
        "a world that the layout does not divide",
        "parallel.tp=2 parallel.pp=2 model.num_layers=2",
        ["world size=6: not a multiple of parallel.tp=2 x parallel.cp=1 x parallel.pp=2", "world size=4 or 8"],
        ranks=6,
    ),
    Row(
        5,
        "heads over tensor-parallel ranks",
        "parallel.tp=8 model.num_attention_heads=12 model.hidden_size=768",
        ["model.num_attention_heads=12: does not split over parallel.tp=8", "parallel.tp=4", "8 or 16"],
        ranks=8,
    ),
    Row(
        6,
        "key-value heads over tensor-parallel ranks",
        "parallel.tp=4 model.num_attention_heads=12 model.hidden_size=768 model.num_key_value_heads=3",
        ["model.num_key_value_heads=3: neither a multiple nor a divisor of parallel.tp=4", "2 or 4"],
        ranks=4,
    ),
    Row(
        6,
        "query heads over key-value heads",
        "model.num_attention_heads=4 model.num_key_value_heads=3",
        ["model.num_key_value_heads=3", "model.num_attention_heads=4", "1 or 2 or 4"],
    ),
    Row(
        7,
        "a width that the heads do not divide",
        "model.hidden_size=1000 model.num_attention_heads=12",
        ["model.hidden_size=1000", "model.num_attention_heads=12", "984 or 1008"],
    ),
    Row(7, "rotary heads of odd size", "model.head_size=33", ["33", "even", "32 or 34"]),
    Row(
        8,
        "the inner width and the vocabulary over tensor-parallel ranks",
        "parallel.tp=4 model.num_attention_heads=4 model.ffn_hidden_size=1022 model.vocab_multiple=2",
        ["2 problems", "model.ffn_hidden_size=1022", "1020 or 1024", "model.vocab_multiple=2", "=4 or"],
        ranks=4,
    ),
    Row(
        9,
        "layers over stages",
        "parallel.pp=4 parallel.vpp=2 model.num_layers=30 train.global_batch_size=16",
        ["model.num_layers=30", "over 8 stages (parallel.pp=4, parallel.vpp=2)", "model.num_layers=24 or 32"],
        ranks=4,
    ),
    Row(
        10,
        "an interleaved schedule of one chunk",
        "parallel.schedule=interleaved",
        ["parallel.schedule='interleaved'", "parallel.vpp=1 is one chunk", "parallel.schedule=1f1b"],
    ),
    Row(
        10,
        "fewer microbatches than pipeline ranks",
        "parallel.pp=4 parallel.vpp=2 model.num_layers=8 train.global_batch_size=2 train.micro_batch_size=1",
        [
            "train.global_batch_size=2: interleaved needs a microbatch",
            "parallel.pp=4 ranks",
            "train.global_batch_size=4 or 5",
        ],
        ranks=4,
    ),
    Row(
        10,
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
        11,
        "a batch that the ranks do not divide",
        "train.global_batch_size=100 train.micro_batch_size=3",
        ["=100: not a multiple of 24", "size=72 or 96 or 120"],
        ranks=8,
    ),
    Row(
        12,
        "experts that do not split over their ranks, nor over groups",
        "parallel.ep=4 model.moe.num_experts=6 model.moe.num_groups=4 train.global_batch_size=8",
        [
            "model.moe.num_experts=6: does not split over parallel.ep=4",
            "model.moe.num_experts=6: does not split over model.moe.num_groups=4",
            "fix: model.moe.num_experts=8 or 12 or 16",
            "2 problems",
        ],
        ranks=4,
    ),
    Row(
        12,
        "experts whose ranks do not divide the world",
        "parallel.ep=2 parallel.etp=2 parallel.pp=2 model.moe.num_experts=8 model.num_layers=2 "
        "train.global_batch_size=6 train.micro_batch_size=1",
        [
            "world size=12: not a multiple of parallel.etp=2 x parallel.ep=2 x parallel.pp=2",
            "parallel.etp=1 or null, or parallel.ep=1",
        ],
        ranks=12,
    ),
    Row(
        12,
        "an expert that does not split over its ranks",
        "parallel.etp=2 model.moe.num_experts=8 model.moe.ffn_hidden_size=33",
        ["model.moe.ffn_hidden_size=33: does not split over parallel.etp=2", "=30 or 32 or 34", "parallel.etp=1"],
        ranks=2,
    ),
    Row(
        12,
        "more choices than experts, fewer places than tokens, and fewer layers than one of experts needs",
        "model.moe.num_experts=2 model.moe.top_k=3 model.moe.capacity_factor=0.3 model.moe.layer_freq=2",
        [
            "3 problems",
            "model.moe.layer_freq=2: more than the layers",
            "model.moe.top_k=3: there are model.moe.num_experts=2",
            "model.moe.capacity_factor=0.3: with model.moe.top_k=3 all experts together take fewer",
        ],
    ),
    Row(
        12,
        "biases of a softmax's experts",
        "model.moe.num_experts=2 model.moe.expert_bias_rate=0.001",
        [
            "model.moe.expert_bias_rate=0.001: a bias moves",
            "model.moe.expert_bias_rate=0.0, or model.moe.score=sigmoid",
        ],
    ),
    Row(
        12,
        "settings of experts without any",
        "parallel.ep=2 model.moe.top_k=1",
        ["model.moe.top_k=1: has no effect with model.moe.num_experts=0", "parallel.ep=2: has no effect"],
        ranks=2,
    ),
    Row(
        13,
        "a sequence that tensor-parallel ranks do not divide",
        "parallel.tp=2 train.seq_length=4097",
        ["train.seq_length=4097: not a multiple of 2", "4096 or 4098", "sequence_parallel=false"],
        ranks=2,
    ),
    Row(
        14,
        "sequence parallelism without tensor parallelism",
        "parallel.sequence_parallel=true",
        [
            "parallel.sequence_parallel=True",
            "nothing to split it over with parallel.tp=1",
            "parallel.sequence_parallel=false or null",
        ],
    ),
    Row(
        15,
        "more positions than the table has",
        "model=gpt2 train.seq_length=2048",
        ["train.seq_length=2048", "model.max_positions=1024", "rope"],
    ),
    Row(
        16,
        "a warm-up longer than the run, and an end above the peak",
        "lr.warmup_steps=20 train.steps=10 lr.min_lr=1",
        ["2 problems", "=20", "train.steps=10", "lr.min_lr=1.0", "optimizer.lr=0.001"],
    ),
    Row(
        16,
        "a decay that begins before the warm-up ends",
        "lr.schedule=wsd lr.warmup_steps=6 lr.decay_steps=5 train.steps=10",
        ["lr.decay_steps=5: with lr.warmup_steps=6 it is longer than the run, train.steps=10", "lr.decay_steps=2"],
    ),
    Row(
        17,
        "no interval and no checkpoint",
        "checkpoint.interval=-1 checkpoint.keep=0",
        ["2 problems", "checkpoint.interval=-1: must be at least 0", "checkpoint.keep=0: must be at least 1"],
    ),
    Row(
        18,
        "bf16 where the device lacks it",
        "precision=bf16",
        ["precision='bf16': an old card cannot multiply bf16", "precision=fp32"],
        gpu_without_bf16,
    ),
    Row(
        18,
        "a loss scale without fp16",
        "optimizer.initial_loss_scale=128",
        ["optimizer.initial_loss_scale=128.0", "has no effect with precision=fp32", "precision=fp16"],
    ),
    Row(
        19,
        "shares and rates outside their range",
        "model.dropout=1 model.attention_dropout=-0.1 optimizer.betas=[0.9,1.0] optimizer.eps=0",
        ["4 problems", "model.dropout=1.0", "below 1", "attention_dropout=-0.1", "betas=[0.9, 1.0]", "eps=0.0: must"],
    ),
    Row(
        20,
        "a length in tokens beside one in steps",
        "train.tokens=1000000",
        ["train.tokens=1000000: unknown setting", "train.steps=N", "train.global_batch_size x train.seq_length"],
    ),
    Row(
        21,
        "a class to be made",
        "model._target_=torch.load",
        ["model._target_='torch.load': unknown setting", "model.activation=swiglu"],
    ),
    Row(22, "nothing to read", "data=text", ["data.path=null", "data=text needs to be told", "data.path=book.txt"]),
    Row(
        22,
        "values left open",
        "train.steps=??? data=text data.path=???",
        [
            "2 problems",
            "train.steps='???'",
            "train.steps=200 in place of ???",
            "data.path='???': Missing mandatory value",
        ],
    ),
    Row(
        23,
        "a reference to nothing",
        "train.steps=${train.stepps}",
        ["train.steps='${train.stepps}'", "'train.stepps' not found", "train.steps=200 in place"],
    ),
    Row(
        23,
        "references in a circle, and one to a whole group",
        "lr.schedule=wsd train.steps=${lr.decay_steps} lr.decay_steps=${train.steps} train.sample_prompts=${data}",
        [
            "2 problems",
            "train.steps='${lr.decay_steps}': Recursive",
            "train.sample_prompts='${data}': ",
        ],
    ),
    Row(
        24,
        "an environment variable that is not set",
        "log.wandb_entity=${oc.env:MEGALITE_TEAM}",
        ["log.wandb_entity=", "Environment variable 'MEGALITE_TEAM' not found"],
    ),
    Row(25, "a preset that there is not", "model=gtp2", ["model='gtp2'", "model=gpt2 is the nearest", "llama3_8b"]),
    Row(25, "a choice", "model.norm=rmsnrom", ["'rmsnrom'", "model.norm=rmsnorm is the nearest", "layernorm"]),
    Row(26, "a secret", "+wandb.api_key=CLISECRET", ["wandb.api_key", "secret", "WANDB_API_KEY", "command lines"]),
    Row(
        27,
        "run_dir is a file",
        "run_dir=taken",
        ["run_dir='taken'", "not a folder", "a new folder"],
        file("taken", b""),
    ),
    Row(
        27,
        "run_dir is among the data",
        "data=text data.path=books run_dir=books/run",
        ["run_dir='books/run': it is inside data.path=books", "change its own data", "a run_dir elsewhere"],
        text_with_a_run_inside,
    ),
    Row(
        27,
        "the default run_dir is among the data",
        "data=text data.path=.",
        ["run_dir=", "runs/", "inside data.path=.", "data.path='*.txt'"],
        file("a.txt", b"some text " * 90),
    ),
    Row(28, "a negative seed", "seed=-1", ["seed=-1: must be at least 0, at most 9223372036854775807"]),
    Row(28, "a seed of 64 bits", "seed=9223372036854775808", ["seed=9223372036854775808: must be at least 0"]),
    Row(
        30,
        "a float for a whole number, a number for yes or no",
        "train.steps=1e3 model.bias=2",
        ["2 problems", "train.steps=1000.0", "whole number", "train.steps=1000\n", "model.bias=2", "true or false"],
    ),
    Row(
        0,
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
