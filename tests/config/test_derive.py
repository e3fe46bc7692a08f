"""Derived values, and the default run folder: named by what defines the training and by nothing else."""

from pathlib import Path
from typing import Any

import pytest

from megalite.config.compose import load_config
from megalite.config.derive import NAME, default_run_name, derive
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values
from megalite.config.step_plan import HORIZONS, IN_TOKENS
from megalite.errors.problems import UserError

OPEN = {  # what the data or the machine decides, or what has no meaning in the default config
    *("model.vocab_size", "model.moe.ffn_hidden_size", "model.moe.capacity_factor", "model.max_positions"),
    *(f"model.rope_{name}" for name in ("original_positions", "attention_factor", "mscale", "mscale_all_dim")),
    *("model.loss_chunk_tokens", "optimizer.bucket_size", "optimizer.ownership", "optimizer.qk_clip"),
    *("optimizer.ema_half_life_steps", "model.mup_base_width", "model.mup_base_layers"),
    *(f"optimizer.muon.{name}" for name in ("lr", "weight_decay", "steps", "dtype")),
    *("checkpoint.init_from", "checkpoint.branch_from", "checkpoint.remote", "launch.status_file"),
    *(f"train.{name}" for name in ("compile", "cuda_graph", "recompute_layers", "sample_prompts", "batch_ramp")),
    *("train.skip_spikes", "train.rollback_after", *HORIZONS[1:], *IN_TOKENS.values()),
    *("train.max_minutes", "train.fp8"),
    *(f"log.{name}" for name in ("wandb", "wandb_entity", "wandb_name", "alert_command", "metrics_port")),
    *(f"parallel.{name}" for name in ("async_tp", "nccl_options", "cp_alltoall", "microbatch_group_size")),
    *(f"parallel.{name}" for name in ("first_stage_layers", "last_stage_layers", "pipeline_layout")),
    *("data.path", "data.weights", "data.validation", "data.subset", "data.workers", "checkpoint.async"),
}


def changed(config: Config, **values: Any) -> Config:
    """A copy with settings given by dotted names, `__` for the dot."""
    return with_values(config, {name.replace("__", "."): value for name, value in values.items()})


def test_nothing_is_left_open_but_what_data_and_machine_decide() -> None:
    derived = derive(Config())
    assert {name for name in SETTINGS if value_of(derived, name) is None} == OPEN


def test_derived_values() -> None:
    config = derive(changed(Config(), model__dropout=0.1, model__num_attention_heads=8, optimizer__lr=0.02))
    assert (config.model.num_key_value_heads, config.model.head_size) == (8, 32)
    assert config.model.ffn_hidden_size == 704  # 8/3 * 256 = 682.7, up to a multiple of 64
    assert (config.model.attention_dropout, config.model.embedding_dropout) == (0.1, 0.1)
    assert (config.lr.warmup_steps, config.lr.decay_steps, config.lr.min_lr) == (20, 40, 0.002)
    assert config.parallel.etp == 1
    assert derive(changed(Config(), train__steps=100_000)).lr.warmup_steps == 100


def test_values_that_are_set_stay() -> None:
    given_values = {
        "model__num_key_value_heads": 2,
        "model__head_size": 48,
        "model__ffn_hidden_size": 100,
        "model__attention_dropout": 0.0,
        "model__dropout": 0.5,
        "lr__warmup_steps": 0,
        "lr__min_lr": 0.0,
        "lr__decay_steps": 0,
    }
    derived = derive(changed(Config(), **given_values))
    assert {name: value_of(derived, name.replace("__", ".")) for name in given_values} == given_values


@pytest.mark.parametrize(
    ("batch", "pp", "world_size", "expected"),
    [
        (64, 1, 1, 8),
        (60, 1, 1, 6),
        (60, 1, 4, 5),
        (7, 1, 7, 1),
        (64, 4, 4, 8),
        (16, 4, 4, 2),
        (16, 4, 8, 1),  # a share of 8
        (18, 4, 4, 2),
        (60, 2, 2, 6),  # 10 microbatches
        (96, 12, 12, 8),
        (84, 12, 12, 7),
        (3, 4, 4, 1),  # fewer than there are ranks, whatever the size
        (5, 4, 4, 1),
    ],
)
def test_a_micro_batch_divides_the_share_and_leaves_a_pipeline_enough_of_them(
    batch: int, pp: int, world_size: int, expected: int
) -> None:
    config = derive(changed(Config(), train__global_batch_size=batch, parallel__pp=pp), world_size)
    assert config.train.micro_batch_size == expected


def test_the_schedule_follows_the_chunks_and_its_groups_the_microbatches() -> None:
    assert derive(changed(Config(), parallel__pp=2), 2).parallel.schedule == "1f1b"
    assert derive(changed(Config(), parallel__pp=2, parallel__schedule="gpipe"), 2).parallel.schedule == "gpipe"
    for batch, group_size in ((8, 4), (9, 5), (5, 5)):  # 9 microbatches in groups of 4 leave one alone
        sizes = {"parallel__pp": 4, "parallel__vpp": 2, "train__micro_batch_size": 1, "train__global_batch_size": batch}
        axes = derive(changed(Config(), **sizes), 4).parallel
        assert (axes.schedule, axes.microbatch_group_size) == ("interleaved", group_size)


def test_blocks_whose_weight_gradients_wait_are_not_compiled() -> None:
    for schedule, compiled in (("zb-h1", False), ("1f1b", None)):  # None: the device decides
        assert derive(changed(Config(), parallel__schedule=schedule)).train.compile is compiled


def test_gradients_travel_as_they_are_summed_unless_set() -> None:
    for values, dtype in (
        ({}, "fp32"),
        ({"optimizer__gradient_dtype": "bf16"}, "bf16"),
        ({"optimizer__communication_dtype": "bf16"}, "bf16"),
    ):
        assert derive(changed(Config(), **values)).optimizer.communication_dtype == dtype


def test_deriving_twice_changes_nothing_and_never_the_original() -> None:
    config = Config()
    derived = derive(config)
    assert derive(derived) == derived
    assert config == Config()


def test_paths_become_absolute_from_the_launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME")
    config = load_config(["data=text", 'data.path=[a.txt,b/*.txt,"~/c",2024]', "run_dir=out"], 1)
    assert config.data.path == [f"{tmp_path}/a.txt", f"{tmp_path}/b/*.txt", "/home/me/c", f"{tmp_path}/2024"]
    assert config.run_dir == f"{tmp_path}/out"
    assert config.data.cache_dir == "/home/me/.cache/megalite"
    assert load_config(["data=hf", "data.path=owner/name"], 1).data.path == "owner/name"
    assert load_config([], 1).run_dir == str(tmp_path / "runs" / Path(str(load_config([], 1).run_dir)).name)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.lr=3e-4"], "lr3e-4"),
        (["data=text", "data.path=books/my text.txt", "tokenizer=char"], "char-my_text"),
        (["model=gpt2", "model.num_layers=6", "model.bias=false", "model.norm=rmsnorm"], "num_layers6-rmsnorm-no_bias"),
        (["model=gpt2", "model.num_layers=12", "train.steps=7"], ""),  # as the preset has it
        (["optimizer.betas=[0.9,0.99]", "seed=2", "parallel.tp=1", "log.wandb=disabled"], "seed2-betas0.9_0.99"),
        (["model={num_layers: 2, hidden_size: 64}"], "num_layers2-hidden_size64"),
        (["experiment=shakespeare_char", "optimizer.lr=2e-3", "data.path=x.txt"], "lr0.002-x"),
    ],
)
def test_the_default_name_tells_what_the_command_sets(overrides: list[str], words: str) -> None:
    config = load_config(overrides, 1)
    name, digest = str(config.run_name).rsplit("-", 1)
    assert name == f"{config.model.name}-{config.data.source}{'-' if words else ''}{words}"
    assert len(digest) == 8
    assert Path(str(config.run_dir)) == Path("runs").absolute() / str(config.run_name)


def test_a_long_name_keeps_its_first_words_and_its_hash() -> None:
    many = [
        f"optimizer.{name}" for name in ("lr=1e-4", "weight_decay=0.2", "clip_grad=2.5", "eps=1e-7", "betas=[0.8,0.9]")
    ]
    config = load_config(["tokenizer=byte", f"data.cache_dir={'x' * 90}", *many], 1)
    assert str(config.run_name).count("-") == 7  # 1e-4 has one of its own
    assert NAME.fullmatch(str(config.run_name))
    moe = ("first_dense_layers=1", "num_shared_experts=2", "normalize_weights=false", "expert_bias_rate=0.0012345")
    config = load_config(["model=deepseek_v3_moe_part", *(f"model.moe.{setting}" for setting in moe)], 1)
    assert NAME.fullmatch(str(config.run_name)), "there is no room for four words"
    *words, digest = str(config.run_name).removeprefix("deepseek_v3_moe_part-stdlib-").split("-")
    assert words == ["moe.num_shared_experts2", "moe.first_dense_layers1"]
    assert len(digest) == 8
    assert NAME.fullmatch(str(load_config([f"model.name={'x' * 64}", *many], 1).run_name))


def test_a_name_is_a_folder_in_runs_unless_the_folder_is_set_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(["run_name=first"], 1).run_dir == str(tmp_path / "runs" / "first")
    both = load_config(["run_name=first", "run_dir=here"], 1)
    assert (both.run_dir, both.run_name) == (str(tmp_path / "here"), "first")


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "-x", "''", "a b", "x" * 101])
def test_a_name_that_is_no_folder_s_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="run_name"):
        load_config([f"run_name={name}"], 1)


OTHER_VALUES = {int: 12, float: 0.25, bool: True, str: "other", Any: "some/path"}
OTHER_VALUES |= {list[int]: [1, 1, 1], list[float]: [0.5, 0.5], list[str]: ["norm"]}
OTHER_VALUES |= {dict[str, Any]: {"web": "web.txt"}}
OTHER_VALUES |= {list[dict[str, Any]]: [{"match": "*", "lr": 0.1}], list[list[float]]: [[0.0, 1.0], [1.0, 0.5]]}


def other_value(name: str) -> Any:
    """A value that the setting may have, and that is not its default."""
    others = [choice for choice in SETTINGS[name].choices if choice != SETTINGS[name].default]
    return others[0] if others else SETTINGS[name].default is not True and OTHER_VALUES[SETTINGS[name].kind]


DEFINES_TRAINING = {
    *("train.global_batch_size", "train.batch_ramp", "train.seq_length"),
    *("train.label_smoothing", "train.z_loss"),
}
SAME_TRAINING = {
    *("run_dir", "run_name", "resume", "device", "precision", "data.cache_dir", "data.workers", "data.streaming"),
    "data.validation",
    "model.name",  # stands in the folder's name itself
    *("model.loss_chunk_tokens", "model.moe.dispatcher", "checkpoint.keep", "checkpoint.async"),
    *("checkpoint.interval", "checkpoint.interval_tokens", "checkpoint.branch_from", "checkpoint.remote"),
    *(f"optimizer.{name}" for name in ("zero", "instances", "bucket_size", "overlap", "ownership", "may_change")),
    *(f"optimizer.{name}" for name in ("communication_dtype", "initial_loss_scale", "min_loss_scale")),
    *(f"optimizer.{name}" for name in ("loss_scale_window", "hysteresis")),
    *(name for name in SETTINGS if name.startswith(("parallel.", "log.", "launch.", "sweep."))),
    *(name for name in SETTINGS if name.startswith("train.") and name not in DEFINES_TRAINING),
}


def test_the_run_folder_depends_on_what_defines_the_training_alone() -> None:
    for name in SETTINGS:
        config = with_values(Config(), {"model.moe.num_experts": 4} if name.startswith("model.moe.") else {})
        other = with_values(config, {name: other_value(name)})
        same = default_run_name(other).split("-")[-1] == default_run_name(config).split("-")[-1]
        assert same == (name in SAME_TRAINING), name


def test_the_name_of_a_run_without_settings_is_that_of_older_versions() -> None:
    """So that its folder is found again. A new setting of TRAINING, or a new default, must leave it as it is."""
    assert load_config([], 1).run_name == default_run_name(Config()) == "tiny-stdlib-7e48ed05"


def test_writing_out_a_derived_size_is_the_same_training() -> None:
    explicit = changed(Config(), model__num_key_value_heads=4, model__head_size=64, model__ffn_hidden_size=704)
    assert default_run_name(explicit) == default_run_name(Config())
