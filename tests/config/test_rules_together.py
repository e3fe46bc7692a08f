"""What rules say together: everything at once, nothing twice, nothing about what is refused already."""

import json
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import settings as sampling
from hypothesis import strategies as st

from megalite.config.clashes import full_name
from megalite.config.compose import load_config
from megalite.config.derive import derive, schedule_request
from megalite.config.layout import exchange_of
from megalite.config.rules import check, schedule_flaws
from megalite.config.schedule_request import ScheduleRequest
from megalite.config.schema import Config, ModelConfig, MoEConfig, ParallelConfig
from megalite.config.settings import SETTINGS, with_values
from megalite.config.step_plan import batch_sizes
from megalite.launch.context import CPU
from megalite.launch.process import ProcessEnvironment
from megalite.layout.parameters import shard_of
from megalite.layout.ranks import ParallelLayout, groups_of
from megalite.model.parameters import gpt_parameters
from megalite.pipeline.schedules import SCHEDULES, build_schedule
from megalite.train.build import device_problems, needs_of
from tests.config.refusal import refusal, settings
from tests.config.test_rules import problems_of


def refused(line: str, world_size: int) -> list[str]:
    return [problem.setting for problem in problems_of(line, world_size)]


@pytest.mark.parametrize(
    ("line", "world_size", "names"),
    [
        (
            "hidden_size=250 global_batch_size=10 micro_batch_size=4 warmup_steps=900 min_lr=1 order=x data.source=hf",
            1,
            "hidden_size order global_batch_size warmup_steps min_lr path",
        ),
        (
            "instances=3 gradient_dtype=bf16 communication_dtype=fp32 moment_dtype=bf16 min_loss_scale=2 hysteresis=7 "
            "precision=fp64",
            4,
            "communication_dtype gradient_dtype hysteresis instances min_loss_scale moment_dtype",
        ),
        (
            "pp=4 vpp=2 parallel.schedule=zb-h1 microbatch_group_size=3 compile=true count_loss=true "
            "first_stage_layers=3",
            4,
            "compile count_loss microbatch_group_size parallel.schedule",
        ),
        (
            "tp=3 vpp=2 cp=2 ep=5 order=tp-tp",
            4,
            "ep model.ffn_hidden_size num_attention_heads order seq_length vpp world_size",
        ),
        (
            "tp=4 num_attention_heads=12 hidden_size=768 num_key_value_heads=5 model.ffn_hidden_size=1002",
            4,
            "model.ffn_hidden_size num_key_value_heads",
        ),
        ("global_batch_size=10 batch_ramp=[4,2,100]", 4, "global_batch_size"),  # not also as a flaw of the way to it
        ("pp=3 num_layers=6", 4, "world_size"),
        ("instances=3 tp=4 global_batch_size=12", 6, "world_size"),
    ],
)
def test_all_that_is_wrong_is_told_at_once_and_no_more(line: str, world_size: int, names: str) -> None:
    assert {name.replace(" ", "_") for name in refused(line, world_size)} == {*map(full_name, names.split())}


@pytest.mark.parametrize(
    "words", [("parallel.tp=two", "optimizer.instances=3"), ("precision=fp8", "train.fp8=rowwise")]
)
def test_nothing_is_judged_by_what_is_refused(words: tuple[str, str]) -> None:
    assert settings(refusal(*words, world_size=4)) == [words[0].partition("=")[0]]


@pytest.mark.parametrize("path", ["a" * 256, "''"])
@pytest.mark.parametrize("name", ["run_dir", "tokenizer", "data.path", "data.cache_dir", "checkpoint.init_from"])
def test_a_name_that_no_file_can_have_is_refused(name: str, path: str) -> None:
    """An empty one is a variable that was not set."""
    line = "data.source=text " if name == "data.path" else ""
    (problem,) = problems_of(f"{line}{name}={path}", 1)
    assert problem.setting == name
    assert problem.rule == "no file can have this name" or (name, path) == ("tokenizer", "''")


def test_the_schedules_that_can_be_asked_for_are_those_that_there_are() -> None:
    assert SETTINGS["parallel.schedule"].choices == tuple(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_sizes_that_are_not_refused_make_a_schedule(name: str) -> None:
    for pp, microbatches in product(range(1, 6), range(1, 12)):
        request = ScheduleRequest(name, pp, microbatches, vpp=3 if name == "interleaved" else 1)
        flaws = [*schedule_flaws(request)]
        assert bool(flaws) == (name == "interleaved" and microbatches < pp)
        assert flaws or build_schedule(request).pp == pp


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_stage_sums_the_gradient_of_a_tied_embedding_with_the_first(tied: bool) -> None:
    needs = needs_of(with_values(Config(), {"model.tie_embeddings": tied}))
    groups = [groups_of(ParallelLayout(pp=4, dp=2), rank, needs) for rank in range(8)]
    found = {rank: one["word-embedding"].ranks for rank, one in enumerate(groups) if one["word-embedding"].ranks}
    assert found == ({0: (0, 6), 6: (0, 6), 1: (1, 7), 7: (1, 7)} if tied else {0: (0,), 1: (1,)})


def test_fp8_takes_the_shapes_of_which_each_ranks_weights_are_multiples_of_16() -> None:
    taken = set()
    for hidden, d, heads, groups, ffn, tp in product((64, 72), (8, 16, 24), (4, 8), (2, 4), (64, 96), (1, 2, 4)):
        sizes = {"hidden_size": hidden, "head_size": d, "num_attention_heads": heads, "ffn_hidden_size": ffn}
        model = ModelConfig(**sizes, num_key_value_heads=groups)  # type: ignore[arg-type]
        config = derive(Config(model=model, precision="bf16", parallel=ParallelConfig(tp=tp)), tp)
        weights = [one for one in gpt_parameters(with_values(config, {"model.vocab_size": 300}).model) if one.split]
        shapes = [shard_of(one.shape, one.split, tp, 0).shape for one in weights if one.name.startswith("blocks.1.")]
        fits = all(prod(shape[:-1]) % 16 == shape[-1] % 16 == 0 for shape in shapes)
        problems = check(with_values(config, {"train.fp8": "rowwise"}), tp)
        assert [problem.setting for problem in problems] == ([] if fits else ["train.fp8"]), (config.model, tp)
        taken.add(fits)
    assert taken == {True, False}


# --- presets, recipes and folders ------------------------------------------------------------------------------------


def test_start_weights_and_tokenizer_may_be_relative_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt").mkdir()
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 1024, "vocab_size": 64}
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    monkeypatch.chdir(tmp_path)
    config = load_config(["checkpoint.init_from=gpt", "tokenizer=./gpt"], 1)
    assert config.checkpoint.init_from == config.tokenizer == str(tmp_path / "gpt")


@pytest.mark.parametrize("preset", ["tiny_moe", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_moe_part"])
def test_a_preset_without_its_experts_is_dense(preset: str) -> None:
    """What the preset says of them is forgotten; what the command itself says of them has no effect."""
    without = [f"model={preset}", "model.moe.num_experts=0"]
    assert settings(refusal(*without, "model.moe.top_k=3")) == ["model.moe.top_k"]
    assert load_config([*without, "model.moe.top_k=2"], 1).model.moe == MoEConfig()


TEXT = ["data=text", "data.path=a"]


@pytest.mark.parametrize("words", [[*TEXT, "data.subset=x"], [*TEXT, "data.streaming=true"], ["data.split=test"]])
def test_what_the_command_asks_for_has_an_effect(words: list[str], tmp_path: Path) -> None:
    (problem,) = refusal(*words).problems
    assert problem.setting == words[-1].partition("=")[0]
    assert problem.rule.startswith("has no effect with")
    (tmp_path / "experiment").mkdir()
    nested = {"data": {"subset": "x", "split": "test", "bpe_vocab_size": 300}, "lr": {"decay_steps": 3}}
    (tmp_path / "experiment" / "rich.yaml").write_text("# @package _global_\n" + yaml.safe_dump(nested))
    config = load_config(["--config-dir", str(tmp_path), "experiment=rich", *TEXT, "tokenizer=byte"], 1)
    assert config.told == ()


@pytest.mark.parametrize(
    "words",
    [
        ["tokenizer=byte", "data.bpe_vocab_size=300"],
        ["lr.decay_steps=3"],
        ["lr.schedule=table", "lr.table=[[0,1]]", "lr.warmup_steps=3"],
        ["model.max_positions=512"],
        ["train.sample_tokens=0", "train.sample_interval=5"],
        ["train.eval_interval=0", "train.eval_batches=2"],
    ],
)
def test_a_run_says_what_does_nothing_in_it(words: list[str]) -> None:
    (told,) = load_config(words, 1).told
    assert told.startswith(f"{words[-1].partition('=')[0]} has no effect with ")


# --- batches that grow -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "world_size", "micro"),
    [
        ({"train.batch_ramp": [4, 4, 100], "train.global_batch_size": 16}, 1, 4),
        ({"train.batch_ramp": [4, 6, 100], "train.global_batch_size": 16}, 2, 1),
        ({"train.batch_ramp": [8, 8, 100], "train.global_batch_size": 32, "parallel.pp": 4}, 4, 2),
        ({"train.batch_ramp": [16, 16, 100], "train.global_batch_size": 32, "parallel.pp": 2, "parallel.vpp": 2}, 4, 2),
    ],
)
def test_a_micro_batch_size_that_nobody_sets_suits_every_batch(
    settings: dict[str, Any], world_size: int, micro: int
) -> None:
    derived = derive(with_values(Config(), settings), world_size)
    assert derived.train.micro_batch_size == micro
    assert check(derived, world_size) == []
    request = schedule_request(derived, world_size)
    sequences = derived.train.global_batch_size // request.microbatches
    for size in batch_sizes(derived.train):
        assert size % sequences == 0
        without = with_values(derived, {"train.batch_ramp": None, "train.global_batch_size": size})
        assert not [*schedule_flaws(schedule_request(without, world_size))]
    assert request.group_size is None, "each number of microbatches has a group of its own"


# --- numbers and precisions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16"])
def test_auto_is_judged_by_what_the_device_makes_of_it(precision: str) -> None:
    for setting in ({"optimizer.gradient_dtype": "bf16"}, {"train.fp8": "rowwise"}):
        config = with_values(Config(), setting)
        (problem,) = device_problems(config, CPU, precision, ProcessEnvironment())
        assert problem.setting in setting
        assert f"precision=auto, which is {precision} here" in problem.rule
        assert not device_problems(config, CPU, "bf16", ProcessEnvironment())


OPTIMIZERS = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["auto", "fp64", "fp32", "bf16", "fp16"]),
        "optimizer.zero": st.sampled_from([0, 1]),
        "optimizer.instances": st.integers(1, 6),
        "optimizer.ownership": st.sampled_from(["even", "whole"]),
        "optimizer.gradient_dtype": st.sampled_from(["fp32", "bf16"]),
        "optimizer.communication_dtype": st.sampled_from([None, "fp32", "bf16"]),
        "optimizer.moment_dtype": st.sampled_from(["fp32", "bf16"]),
        "optimizer.initial_loss_scale": st.sampled_from([65536.0, 2.0, 0.5]),
        "optimizer.min_loss_scale": st.sampled_from([1.0, 2.0]),
        "optimizer.hysteresis": st.sampled_from([1, 2]),
    }
)


@sampling(max_examples=200, deadline=None)
@given(OPTIMIZERS, st.sampled_from([1, 2, 3, 4, 6]))
def test_a_config_that_is_accepted_is_accepted_once_derived(values: dict[str, Any], world_size: int) -> None:
    config = with_values(Config(), values | {"train.global_batch_size": 12})
    if not check(config, world_size):
        assert check(derive(config, world_size), world_size) == []


@pytest.mark.parametrize(
    ("cp", "heads", "groups", "others", "name"),
    [
        (4, 8, 8, {}, "alltoall"),  # all heads have keys: a ring would send 24, this 12 per token
        (4, 32, 2, {}, "ring"),  # keys are few
        (4, 3, 3, {}, "ring"),  # heads do not divide
        (4, 6, 6, {}, "alltoall of 2 + ring of 2"),
        (4, 3, 3, {"data.cross_document_attention": False}, "allgather"),
        (4, 32, 2, {"data.cross_document_attention": False}, "alltoall"),
        (4, 32, 2, {"model.attention_dropout": 0.1}, "alltoall"),
        (4, 8, 8, {"parallel.cp_comm": "allgather"}, "allgather"),
        (8, 12, 4, {"parallel.cp_comm": "alltoall+ring"}, "alltoall of 4 + ring of 2"),
        (8, 8, 8, {"parallel.cp_comm": "alltoall+ring", "parallel.cp_alltoall": 2}, "alltoall of 2 + ring of 4"),
    ],
)
def test_it_follows_heads_documents_and_dropout(
    cp: int, heads: int, groups: int, others: dict[str, Any], name: str
) -> None:
    sizes = {"parallel.cp": cp, "model.num_attention_heads": heads, "model.num_key_value_heads": groups}
    assert exchange_of(with_values(Config(), sizes | others)).name == name


FLOATS = [name for name, one in SETTINGS.items() if one.kind in (float, list[float]) and one.group != "data"]


@pytest.mark.parametrize("name", FLOATS)
def test_what_fp32_cannot_hold_is_refused_but_in_fp64(name: str) -> None:
    """numpy says what fp32 holds."""
    for number in (1e39, 1e-46, 1 - 1e-9, 1.1, 3e-38):
        value = f"[{number!r},0.5]" if SETTINGS[name].kind == list[float] else repr(number)
        with np.errstate(all="ignore"):
            held = float(np.float32(number))
        limits = SETTINGS[name].limits
        lost = not np.isfinite(held) or held == 0 or ("below" in limits and held >= limits["below"])
        of_itself = bool(problems_of(f"precision=fp64 {name}={value}", 1))  # out of bounds, without effect
        for precision in ("auto", "bf16", "fp16"):
            rules = [problem.rule for problem in problems_of(f"precision={precision} {name}={value}", 1)]
            told = any(rule.startswith("fp32 holds it as") for rule in rules)
            assert told == (
                lost and not any(rule.startswith(("must be at", "must be above", "must be below")) for rule in rules)
            ), (number, precision, rules)
        assert of_itself or not any("fp32" in one.rule for one in problems_of(f"precision=fp64 {name}={value}", 1))


def test_an_eps_that_is_nothing_in_fp32_is_refused_before_it_divides() -> None:
    (problem,) = refusal("optimizer.eps=1e-60").problems
    assert problem.hint == "optimizer.eps=1e-08, or precision=fp64"
