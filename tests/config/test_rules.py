"""Rules that join settings: each refusal holds the numbers and values that work, and those values do work."""

import json
import re
import shlex
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from megalite.config.compose import load_config
from megalite.config.derive import derive
from megalite.config.rules import check
from megalite.config.schema import Config, ModelConfig, ParallelConfig
from megalite.config.settings import with_values
from megalite.errors.problems import Problem
from megalite.layout.parameters import shard_of
from megalite.model.parameters import gpt_parameters
from tests.config.refusal import refusal, settings

HEADS = "model.num_attention_heads"

YARN = "model.rope_scaling=yarn model.rope_scaling_factor=4 model.rope_original_positions=50"

# Command line, world size, the setting that is named, and words of the message.
BROKEN = [
    ("model.hidden_size=250", 1, "model.hidden_size", ["num_attention_heads=4", "248 or 256", "model.head_size"]),
    ("model.num_key_value_heads=3", 1, "model.num_key_value_heads", ["num_attention_heads=4", "1 or 2 or 4"]),
    ("model.head_size=33", 1, "model.head_size", ["even", "32 or 34", "learned"]),
    ("model.hidden_size=252 model.num_attention_heads=12", 1, "model.hidden_size", ["21", "240 or 264"]),
    ("model.position=learned model.max_positions=128", 1, "train.seq_length", ["256", "128", "rope"]),
    ("model.position=learned model.max_positions=1024 train.seq_length=2048", 1, "train.seq_length", ["1024", "2048"]),
    (
        "model.rope_scaling_factor=8 model.rope_original_positions=99 model.rope_high_frequency_factor=1",
        1,
        "model.rope_high_frequency_factor",
        ["=4.0"],
    ),
    ("train.attention=flash device=cpu", 1, "train.attention", ["no effect with device=cpu", "=auto"]),
    ("train.attention=cudnn precision=fp32", 1, "train.attention", ["16 bits", "=auto", "precision=bf16"]),
    ("train.attention=cudnn model.dropout=0.1", 1, "train.attention", ["no effect", "model.attention_dropout=0.0"]),
    ("train.attention=fa4 precision=fp32", 1, "train.attention", ["16 bits", "=auto", "precision=bf16"]),
    ("train.attention=flex train.compile=false", 1, "train.attention", ["compiled", "train.compile=true"]),
    (
        "train.attention=flex parallel.pp=2 parallel.schedule=zb-h1",
        2,
        "train.attention",
        ["compiled", "parallel.schedule=zb-h1", "=auto", "parallel.schedule=1f1b"],
    ),
    (
        "train.attention=fa4 parallel.cp=2 parallel.cp_comm=ring",
        2,
        "train.attention",
        ["tiles", "=auto", "parallel.cp_comm=alltoall"],
    ),
    ("train.attention=flash parallel.cp=2 parallel.cp_comm=allgather", 2, "train.attention", ["tiles", "=auto"]),
    (
        "train.attention=flex parallel.cp=4 parallel.cp_comm=alltoall+ring data.cross_document_attention=false",
        4,
        "train.attention",
        ["tiles", "alltoall of 2 + ring of 2", "=auto"],
    ),
    ("train.attention=flex precision=fp64", 1, "train.attention", ["no fp64", "=auto", "precision=fp32"]),
    ("train.attention=flex model.head_size=8", 1, "train.attention", ["16", "have 8", "=auto", "model.head_size=16"]),
    ("train.attention=flash data.cross_document_attention=false", 1, "train.attention", ["documents", "auto or flex"]),
    (
        "train.cuda_graph=true device=cpu",
        1,
        "train.cuda_graph",
        ["no effect with device=cpu", "train.cuda_graph=null"],
    ),
    ("train.cuda_graph=true", 2, "train.cuda_graph", ["one process, not 2"]),
    ("train.cuda_graph=true model.moe.num_experts=4", 1, "train.cuda_graph", ["experts"]),
    ("train.cuda_graph=true data.cross_document_attention=false", 1, "train.cuda_graph", ["masks", "=true"]),
    ("train.cuda_graph=true model.dropout=0.1", 1, "train.cuda_graph", ["model.dropout=0.1", "model.dropout=0.0"]),
    ("train.fp8=rowwise precision=fp32", 1, "train.fp8", ["precision=fp32", "precision=bf16", "train.fp8=null"]),
    ("train.fp8=rowwise precision=fp16", 1, "train.fp8", ["precision=fp16", "precision=bf16"]),
    ("train.fp8=tensorwise model.num_layers=2", 1, "train.fp8", ["no others", "model.num_layers=3"]),
    ("train.fp8=rowwise model.ffn_hidden_size=100", 1, "train.fp8", ["ffn_hidden_size (100)", "=80 or 96 or 112"]),
    (
        "train.fp8=rowwise model.hidden_size=264 model.num_attention_heads=3",
        1,
        "train.fp8",
        ["model.hidden_size (264), attention's inputs (264), attention's outputs (792)", "=192 or 240 or 288"],
    ),
    (
        "train.fp8=rowwise model.head_size=24 model.num_attention_heads=12 model.num_key_value_heads=4 parallel.tp=4",
        4,
        "train.fp8",
        ["on each rank of parallel.tp=4: attention's inputs (72), attention's outputs (120)", "parallel.tp=1 or 2"],
    ),
    ("model.rope_scaling=yarn", 1, "model.rope_scaling", ["no effect", "model.rope_scaling_factor=N", "=llama3"]),
    ("model.rope_scaling_factor=4", 1, "model.rope_original_positions", ["must be set", "=64", "rope_scaling=linear"]),
    (f"{YARN}0 model.rope_beta_slow=32", 1, "model.rope_beta_fast", ["above model.rope_beta_slow=32", "=1024.0"]),
    (f"{YARN} model.rope_theta=1", 1, "model.rope_theta", ["above 1", "=10000.0"]),
    (f"{YARN} model.rope_beta_slow=9 model.rope_beta_fast=99", 1, "model.rope_original_positions", ["9 times", "=57"]),
    (f"{YARN} model.rope_mscale=1", 1, "model.rope_mscale", ["without model.rope_mscale_all_dim", "_all_dim=1.0"]),
    (
        f"{YARN} model.rope_mscale=1 model.rope_mscale_all_dim=1 model.rope_attention_factor=2",
        1,
        "model.rope_attention_factor",
        ["in place of model.rope_mscale and model.rope_mscale_all_dim", "model.rope_attention_factor=null"],
    ),
    (
        "model.rope_scaling=linear model.rope_scaling_factor=2 model.rope_truncate=false",
        1,
        "model.rope_truncate",
        ["no effect with model.rope_scaling=linear", "model.rope_truncate=true"],
    ),
    (
        "model.position=learned model.rope_scaling_factor=2 model.rope_original_positions=9",
        1,
        "model.rope_scaling_factor",
        ["no effect with model.position=learned", "=1.0"],
    ),
    ("model.name=../up", 1, "model.name", ["a letter or digit first"]),
    ("model.name=größe", 1, "model.name", ["of a-z"]),
    (f"model.name={'x' * 65}", 1, "model.name", ["at most 64"]),
    (
        "train.global_batch_size=100 train.micro_batch_size=3",
        8,
        "train.global_batch_size",
        ["3 x 8", "24", "96 or 120"],
    ),
    ("train.global_batch_size=12 train.micro_batch_size=5", 4, "train.global_batch_size", ["micro_batch_size=1 or 3"]),
    ("train.global_batch_size=16 train.micro_batch_size=16", 3, "train.global_batch_size", ["48", "world size=1"]),
    (
        "train.global_batch_size=8",
        3,
        "train.global_batch_size",
        ["6 or 9", "3 data-parallel ranks", "world size=1"],
    ),
    ("parallel.tp=4 train.global_batch_size=8", 12, "train.global_batch_size", ["6 or 9", "world size=4"]),
    ("train.steps=300 lr.warmup_steps=301", 1, "lr.warmup_steps", ["train.steps=300", "lr.warmup_steps=30", "301"]),
    (
        "train.steps=300 lr.schedule=wsd lr.warmup_steps=200 lr.decay_steps=101",
        1,
        "lr.decay_steps",
        ["200", "300", "60"],
    ),
    ("lr.min_lr=0.01", 1, "lr.min_lr", ["optimizer.lr=0.001", "0.0001"]),
    ("optimizer.betas=[0.9]", 1, "optimizer.betas", ["two numbers"]),
    ("optimizer.betas=[0.9,1.0]", 1, "optimizer.betas", ["below 1"]),
    ("optimizer.betas=[-0.1,0.9]", 1, "optimizer.betas", ["at least 0"]),
    ("parallel.ep=2", 2, "parallel.ep", ["has no effect with model.moe.num_experts=0", "=8", "parallel.ep=1"]),
    ("parallel.etp=2", 2, "parallel.etp", ["has no effect with model.moe.num_experts=0"]),
    (
        "parallel.tp=3 model.ffn_hidden_size=96 train.seq_length=255",
        3,
        "model.num_attention_heads",
        [
            "parallel.tp=3",
            "fix: parallel.tp=1 and another train.global_batch_size",
        ],  # 3 divides no width
    ),
    ("parallel.tp=4 model.num_attention_heads=6 model.hidden_size=384", 4, HEADS, ["parallel.tp=1 or 2, or", "4 or 8"]),
    ("parallel.tp=4 model.ffn_hidden_size=701", 4, "model.ffn_hidden_size", ["fix: parallel.tp=1, or", "700 or 704"]),
    (
        "parallel.tp=2 model.num_attention_heads=25 model.hidden_size=1600 model.position=learned",
        4,
        HEADS,
        ["fix: parallel.tp=1, or model.num_attention_heads=16 or 20 or 32"],
    ),
    (
        "parallel.tp=4 model.num_attention_heads=12 model.num_key_value_heads=6 model.hidden_size=240",
        4,
        "model.num_key_value_heads",
        [
            "neither a multiple nor a divisor of parallel.tp=4",
            "parallel.tp=1 or 2, or model.num_key_value_heads=1 or 2 or 4",
        ],
    ),
    ("parallel.tp=4 model.ffn_hidden_size=90", 4, "model.ffn_hidden_size", ["parallel.tp=4", "88 or 92"]),
    ("parallel.tp=4 train.seq_length=102", 4, "train.seq_length", ["100 or 104", "sequence_parallel=false"]),
    ("parallel.async_tp=true", 4, "parallel.async_tp", ["no effect with parallel.tp=1", "parallel.tp=2 or 4"]),
    ("parallel.async_tp=true parallel.tp=2 train.compile=false", 2, "parallel.async_tp", ["train.compile=true"]),
    (
        "parallel.async_tp=true parallel.tp=2 parallel.pp=2 parallel.schedule=zb-h1",
        4,
        "parallel.async_tp",
        ["parallel.schedule=zb-h1", "parallel.async_tp=null", "parallel.schedule=1f1b"],
    ),
    (
        "parallel.async_tp=true parallel.tp=2 train.fp8=rowwise",
        2,
        "parallel.async_tp",
        ["train.fp8=rowwise", "train.fp8=null"],
    ),
    ("parallel.async_tp=true parallel.tp=2 device=cpu", 2, "parallel.async_tp", ["no effect with device=cpu"]),
    (
        "parallel.async_tp=true parallel.tp=2 parallel.sequence_parallel=false",
        2,
        "parallel.async_tp",
        ["no effect with parallel.sequence_parallel=false"],
    ),
    (
        "parallel.sequence_parallel=true",
        1,
        "parallel.sequence_parallel",
        ["fix: parallel.sequence_parallel=null"],
    ),
    (
        "parallel.sequence_parallel=true",
        8,
        "parallel.sequence_parallel",
        ["fix: parallel.tp=2 or 4, or parallel.sequence_parallel=null"],
    ),
    (
        "parallel.tp=4 model.vocab_multiple=2",
        4,
        "model.vocab_multiple",
        ["model.vocab_multiple=4 or 8"],
    ),
    ("train.recompute_modules=[attention,norms]", 1, "train.recompute_modules", ["norm is the nearest"]),
    ("train.recompute=selective train.recompute_modules=[]", 1, "train.recompute_modules", ["recompute=none"]),
    (
        "train.recompute=selective train.recompute_modules=[norm,attention,norm]",
        1,
        "train.recompute_modules",
        ["more than once", "train.recompute_modules=[norm,attention]"],
    ),
    ("train.recompute_modules=[norm]", 1, "train.recompute_modules", ["recompute=none", "recompute=selective"]),
    ("train.recompute=full train.recompute_modules=[norm]", 1, "train.recompute_modules", ["no effect"]),
    ("train.recompute_layers=2", 1, "train.recompute_layers", ["train.recompute=none", "train.recompute=full"]),
    (
        "train.recompute=full train.recompute_layers=5",
        1,
        "train.recompute_layers",
        ["num_layers=4", "recompute_layers=4"],
    ),
    ("parallel.order=tp-cp-pp train.global_batch_size=6", 2, "parallel.order", ["no place for dp", "tp-cp-pp-ep-dp"]),
    ("parallel.order=tp-cp-ep-dp-pp-tp", 1, "parallel.order", ["none twice", "fix: parallel.order=tp-cp-ep-dp-pp"]),
    ("parallel.order=tp-zp", 1, "parallel.order", ["tp, cp, ep, dp, pp"]),
    ("parallel.nccl_options=none.yaml", 1, "parallel.nccl_options", ["none.yaml"]),
    ("data.source=text", 1, "data.path", ["data=text", "data.path="]),
    ("data.source=hf", 1, "data.path", ["data=hf", "data.path="]),
    ("data.source=tokens data.path=[]", 1, "data.path", ["data=tokens"]),
    ("data.source=text data.path=[a,null]", 1, "data.path", ["text or a list"]),
    ("data.source=text 'data.path={a: b}'", 1, "data.path", ["text or a list"]),
    ("data.path=a.txt", 1, "data.path", ["stdlib", "data=text"]),
    ("data.source=text data.path=a data.weights=[1]", 1, "data.weights", ["several parts"]),
    ("data.source=text data.path=[a,b] data.weights=[1]", 1, "data.weights", ["1 share for", "2 parts"]),
    ("data.source=text data.path=[a,b] data.weights=[1,-1]", 1, "data.weights", ["above 0"]),
    ("data.source=text data.path=[a,b] data.weights=[0,0]", 1, "data.weights", ["above 0"]),
    ("data.source=text data.path=[a,b] data.weights=[1,nan]", 1, "data.weights", ["finite"]),
    ("model.vocab_size=1000", 1, "model.vocab_size", ["4096", "data.bpe_vocab_size=1000"]),
    ("tokenizer=./none", 1, "tokenizer", ["no folder"]),
    ("tokenizer=/none/such", 1, "tokenizer", ["no folder /none/such"]),
    ("'tokenizer=by te'", 1, "tokenizer", ["tokenizer=byte", "hub name"]),
    ("tokenizer=", 1, "tokenizer", ["bpe, byte, char"]),
    ("checkpoint.init_from=none", 1, "checkpoint.init_from", ["does not exist", "save_pretrained"]),
    *(
        (f"{source} {name}={'a' * 256}", 1, name, ["File name too long"])
        for name, source in {
            "run_dir": "",
            "tokenizer": "",
            "data.path": "data.source=text",
            "data.cache_dir": "",
            "checkpoint.init_from": "",
            "parallel.nccl_options": "",
        }.items()
    ),
    (f"run_dir={'a/' * 2100}", 1, "run_dir", ["File name too long"]),
    ("run_dir='~nobody-of-this-name/x'", 1, "run_dir", ["no user nobody-of-this-name", "./~nobody"]),
    ("checkpoint.init_from=/", 1, "checkpoint.init_from", ["no config.json"]),
]


def problems_of(line: str, world_size: int) -> list[Problem]:
    """The problems of a config given as `name=value` words; without Hydra, which would take most of the time."""
    config = OmegaConf.structured(Config)
    for word in shlex.split(line):
        name, _, value = word.partition("=")
        OmegaConf.update(config, name, yaml.safe_load(value) if value else value)
    plain = OmegaConf.to_object(config)
    assert isinstance(plain, Config)
    return check(plain, world_size)


@pytest.mark.parametrize(
    ("line", "world_size", "name", "words"), BROKEN, ids=[f"{row[0]} on {row[1]}" for row in BROKEN]
)
def test_a_broken_rule_names_the_setting_and_what_would_work(
    line: str, world_size: int, name: str, words: list[str]
) -> None:
    problems = problems_of(line, world_size)
    assert [problem.setting for problem in problems] == [name], problems
    assert all(word in str(problems[0]) for word in words), str(problems[0])


@pytest.mark.parametrize(
    ("line", "world_size"),
    [
        (row[0], row[1])
        for row in BROKEN
        if row[2].startswith(("model.hidden", "model.num", "train.", "lr.", "optimizer."))
        and "parallel." not in row[0]
        and not re.search("recompute|train.attention|cuda_graph|precision", row[0])
    ],
)
def test_following_the_advice_helps(line: str, world_size: int) -> None:
    """Every `name=number or number` of a remedy is tried on top of the refused command line."""
    (problem,) = problems_of(line, world_size)
    tried = 0
    for name, values in re.findall(r"([a-z_]+\.[a-z_]+)=(\[[^\]]+\]|[\d.]+(?: or [\d.]+)*)", problem.remedy):
        for value in values.split(" or "):
            assert problems_of(f"{line} {name}={value}", world_size) == []
            tried += 1
    assert tried, problem.remedy


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train.recompute": "selective"},
        {"train.recompute": "selective", "train.recompute_modules": ["norm", "attention"]},
        {"train.recompute": "full", "train.recompute_layers": 4},
        {"train.recompute": "full", "train.recompute_modules": []},
    ],
)
def test_what_recompute_does_is_accepted_and_so_is_the_config_of_such_a_run(settings: dict[str, Any]) -> None:
    config = with_values(Config(), settings)
    assert check(config, 1) == check(derive(config, 1), 1) == []


def test_fp8_takes_the_shapes_of_which_each_ranks_weights_are_multiples_of_16() -> None:
    taken = set()
    for hidden, d, heads, groups, ffn, tp in product((64, 72), (8, 16, 24), (4, 8), (2, 4), (64, 96), (1, 2, 4)):
        sizes = {"hidden_size": hidden, "head_size": d, "num_attention_heads": heads, "ffn_hidden_size": ffn}
        model = ModelConfig(**sizes, num_key_value_heads=groups)
        config = derive(Config(model=model, precision="bf16", parallel=ParallelConfig(tp=tp)), tp)
        weights = [one for one in gpt_parameters(with_values(config, {"model.vocab_size": 300}).model) if one.split]
        shapes = [shard_of(one.shape, one.split, tp, 0).shape for one in weights if one.name.startswith("blocks.1.")]
        fits = all(prod(shape[:-1]) % 16 == shape[-1] % 16 == 0 for shape in shapes)
        problems = check(with_values(config, {"train.fp8": "rowwise"}), tp)
        assert [problem.setting for problem in problems] == ([] if fits else ["train.fp8"]), (config.model, tp)
        taken.add(fits)
    assert taken == {True, False}


def test_what_tensor_parallelism_does_not_split_is_told_beside_a_mistake_of_the_model() -> None:
    line = "parallel.tp=4 model.num_attention_heads=12 model.hidden_size=768 model.num_key_value_heads=5"
    problems = problems_of(f"{line} model.ffn_hidden_size=1002", 4)
    assert [problem.setting for problem in problems] == ["model.num_key_value_heads", "model.ffn_hidden_size"]
    assert problems[0].remedy == "model.num_key_value_heads=1 or 2 or 4"  # 3 and 6 do not suit parallel.tp=4


def test_a_layout_that_fills_the_world_is_advised_only_where_the_model_splits() -> None:
    (problem,) = problems_of("parallel.tp=4 train.global_batch_size=12", 6)
    assert problem.remedy == "world size=4 or 8 or 12, or parallel.tp=1 or 2"  # 3 and 6 do not divide 4 heads


def test_a_layout_must_divide_the_world() -> None:
    problems = problems_of("parallel.pp=3 model.num_layers=6", 4)
    assert [problem.setting for problem in problems] == ["world size"]
    assert problems[0].remedy == "world size=3 or 6 or 12, or parallel.pp=1 or 2"


def test_layers_must_split_over_the_stages() -> None:
    problems = [problem for problem in problems_of("parallel.pp=3", 3) if problem.setting == "model.num_layers"]
    assert [problem.value for problem in problems] == [4]
    assert "model.num_layers=3 or 6" in problems[0].remedy
    problems = problems_of("parallel.pp=2 parallel.vpp=4", 2)
    assert any("parallel.pp=2, parallel.vpp=4" in problem.rule for problem in problems)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_tensor_parallel_ranks_may_share_key_value_heads(heads: int) -> None:
    assert problems_of(f"parallel.tp=4 model.num_key_value_heads={heads}", 4) == []


def test_without_sequence_parallelism_any_length_will_do() -> None:
    assert problems_of("parallel.tp=4 train.seq_length=102 parallel.sequence_parallel=false", 4) == []


def test_an_order_may_leave_out_axes_of_size_one() -> None:
    assert problems_of("parallel.order=dp-pp", 2) == []


def test_all_that_is_wrong_with_a_layout_is_said_at_once() -> None:
    problems = problems_of("parallel.tp=3 parallel.vpp=2 parallel.cp=2 parallel.ep=5 parallel.order=tp-tp", 4)
    said = [(problem.setting, problem.rule.split(":")[0]) for problem in problems]
    assert "train.seq_length" in [setting for setting, _ in said]  # 256 tokens, 2 x 2 x 3 pieces
    rules = " ".join(rule for _, rule in said)
    for words in ("none twice", "virtual stages divide", "= 6", "= 15, the ranks of one set"):
        assert words in rules


def test_start_weights_and_tokenizer_may_be_relative_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt").mkdir()
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 1024, "vocab_size": 64}
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    monkeypatch.chdir(tmp_path)
    config = load_config(["checkpoint.init_from=gpt", "tokenizer=./gpt"], 1)
    assert config.checkpoint.init_from == config.tokenizer == str(tmp_path / "gpt")


def test_the_default_config_is_right_on_one_and_two_ranks() -> None:
    assert check(Config(), 1) == check(Config(), 2) == []


def test_many_broken_rules_are_all_told() -> None:
    line = (
        "model.hidden_size=250 train.global_batch_size=10 train.micro_batch_size=4 lr.warmup_steps=900 lr.min_lr=1 "
        "parallel.order=x data=hf"
    )
    expected = [
        "model.hidden_size",
        "parallel.order",
        "train.global_batch_size",
        "lr.warmup_steps",
        "lr.min_lr",
        "data.path",
    ]
    assert settings(refusal(*line.split())) == expected


TEXT = ["data=text", "data.path=a"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([*TEXT, "data.subset=x"], "data.subset"),
        ([*TEXT, "data.streaming=true"], "data.streaming"),
        (["data.split=test"], "data.split"),
    ],
)
def test_what_the_command_asks_for_has_an_effect(words: list[str], name: str, tmp_path: Path) -> None:
    (problem,) = refusal(*words).problems
    assert (problem.setting, problem.rule.startswith("has no effect with")) == (name, True)
    (tmp_path / "experiment").mkdir()
    nested = {"data": {"subset": "x", "split": "test", "bpe_vocab_size": 300}, "lr": {"decay_steps": 3}}
    (tmp_path / "experiment" / "rich.yaml").write_text("# @package _global_\n" + yaml.safe_dump(nested))
    config = load_config(["--config-dir", str(tmp_path), "experiment=rich", *TEXT, "tokenizer=byte"], 1)
    assert config.told == ()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["tokenizer=byte", "data.bpe_vocab_size=300"], "data.bpe_vocab_size"),
        (["lr.decay_steps=3"], "lr.decay_steps"),
        (["model.max_positions=512"], "model.max_positions"),
        (["train.sample_tokens=0", "train.sample_interval=5"], "train.sample_interval"),
        (["train.eval_interval=0", "train.eval_batches=2"], "train.eval_batches"),
    ],
)
def test_a_run_says_what_does_nothing_in_it(words: list[str], name: str) -> None:
    (told,) = load_config(words, 1).told
    assert told.startswith(f"{name} has no effect with ")
