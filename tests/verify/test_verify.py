"""`megalite verify` says pass where ranks train like one process, fail where they do not, and keeps every feature."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint import store
from megalite.checkpoint.commit import CHECKPOINTS
from megalite.commands import plan
from megalite.commands.train import train_rank
from megalite.config.compose import load_config
from megalite.config.layout import layout_of, stage_settings
from megalite.config.rules import check
from megalite.config.schema import Config, MuonConfig, OptimizerConfig
from megalite.errors.problems import Problem, UserError, refuse
from megalite.launch.context import ParallelContext
from megalite.launch.process import ProcessEnvironment
from megalite.layout.stages import stage_layers
from megalite.model.scaling import growth
from megalite.optim.groups import parameters_of_groups
from megalite.train import run
from megalite.train.history import METRICS
from megalite.verify.shrink import MOST_RANKS, load, shrink, vocabulary_of
from megalite.verify.verify import compare
from tests.checkpoint.samples import SINGLE, whole
from tests.layouts import moe_mutants, mutants
from tests.ranks import start_forkserver
from tests.warm import warm_python

REPOSITORY = Path(__file__).parents[2]
GROUPED = "model.num_attention_heads=8 model.num_key_value_heads=2 model.tie_embeddings=false"
TRICKY = "data.mask_end_of_document=true data.cross_document_attention=false train.label_smoothing=0.1"


@pytest.fixture(autouse=True)
def _forkserver() -> None:
    start_forkserver()  # the tests' own has more preloaded


MOE = "model.moe.num_experts=4 model.moe.z_loss_coeff=0.01"
SIGMOID = f"{MOE} model.moe.score=sigmoid model.moe.expert_bias_rate=0.01"
ROUTED = f"{MOE} parallel.ep=2"
TIED = {"embedding", "attention", "mlp", "norms"}
UNTIED = TIED | {"head"}
EXPERTS = TIED - {"mlp"} | {"router", "experts"}


@pytest.mark.parametrize(
    ("words", "ranks", "parts"),
    [
        ("parallel.tp=2 --dp=1", 2, TIED),
        ("parallel.tp=2 optimizer.instances=2", 4, TIED),
        (f"parallel.tp=2 parallel.sequence_parallel=false model=gpt2 {TRICKY}", 4, TIED),
        (f"--dp=1 parallel.tp=4 train.recompute=full {GROUPED}", 4, UNTIED),  # two ranks share a key-value head
        ("--dp=3 train.global_batch_size=6", 3, TIED),
        ("--world-size=64 parallel.tp=8 model=qwen3_8b train.global_batch_size=64", 4, UNTIED),
        (f"{ROUTED} --dp=2 model.moe.capacity_factor=1.0 train.global_batch_size=16", 2, EXPERTS),
        (f"{ROUTED} --dp=1 parallel.tp=2 parallel.etp=1 model.moe.num_shared_experts=1", 2, EXPERTS | {"shared"}),
        (f"{ROUTED} --dp=2 parallel.pp=2 {SIGMOID.removeprefix(MOE)}", 4, EXPERTS),
    ],
)
def test_a_sound_layout_passes(capsys: pytest.CaptureFixture[str], words: str, ranks: int, parts: set[str]) -> None:
    assert plan.verify(words.split()) == 0
    printed = capsys.readouterr().out
    assert f"PASS: {ranks} ranks" in printed
    assert "FAIL" not in printed
    rows = dict(re.findall(r"^(\S.*?\S)  +(\S+) .* pass ", printed, re.MULTILINE))
    numbers = ["tokens in the loss", "loss", "gradient norm"]
    numbers += ["tokens of experts", "losses of routers"] if "experts" in parts else []
    assert rows.keys() == {*numbers, *(f"{kind}: {part}" for kind in ("gradients", "parameters") for part in parts)}
    assert all(float(scale) > 0 for scale in rows.values())


def with_mistake(mutant: Any, config: Config, place: ProcessEnvironment) -> int:
    """Train as users do, on the ranks of the layout with the mistake of a mutant of tests/layouts, which needs to know
    the rank."""
    open_context = run.open_context

    def open_and_break(*settings: Any) -> ParallelContext:
        mutant(context := open_context(*settings), config)
        return context

    if place.world_size > 1:
        run.open_context = open_and_break
    return train_rank(config, place)


ALONE = "parallel.sequence_parallel=false"
MUTANTS: list[tuple[Any, str, tuple[str, ...]]] = [
    (mutants.no_sum_of_partial_gradients, "parallel.tp=2", ("gradient norm", "gradients: norms")),
    (mutants.no_gather_of_parameters, "", ("loss", "parameters: mlp")),
    (moe_mutants.own_counts_move_the_bias, f"{SIGMOID} parallel.ep=2", ("parameters: router",)),
]
LONG_MUTANTS: list[tuple[Any, str, tuple[str, ...]]] = [
    (mutants.no_sum_of_input_gradients, f"parallel.tp=2 {ALONE}", ("gradients: attention",)),
    (mutants.own_slice_of_input_gradients, "parallel.tp=2", ()),
    (mutants.replicas_counted_on_every_rank, f"model=gpt2 parallel.tp=2 {ALONE}", ("gradient norm",)),
    (mutants.same_shard_drawn_everywhere, f"parallel.tp=2 {ALONE}", ()),
    (mutants.padding_in_the_loss, "parallel.tp=2 model.vocab_multiple=7 model.vocab_size=4097", ("loss",)),
    (mutants.rows_off_by_one_on_one_rank, "parallel.tp=2", ("loss",)),
    (mutants.mask_ignored_on_one_rank, "parallel.tp=2 data.mask_end_of_document=true", ()),
    (mutants.mean_of_local_means, "data.mask_end_of_document=true", ("loss",)),
    (mutants.next_rank_s_slices, "", ()),
    (mutants.sent_before_the_last_microbatch, "train.global_batch_size=16 train.micro_batch_size=2", ()),
    (mutants.decay_of_everything, "", ("parameters: norms",)),
    (mutants.no_sum_inside_instances, "--dp=4 optimizer.instances=2", ()),
    (mutants.no_sum_over_tied_embeddings, "parallel.pp=2 model.tie_embeddings=true", ("gradients: embedding",)),
    (mutants.weight_gradients_forgotten, "parallel.pp=2 parallel.schedule=zb-h1", ()),
    (mutants.activations_of_another_microbatch, "parallel.pp=2", ("loss",)),
    (moe_mutants.no_sum_of_router_gradients, f"{MOE} parallel.tp=2 parallel.etp=1", ("gradients: router",)),
    (moe_mutants.rows_returned_in_the_experts_order, f"{MOE} parallel.ep=2", ("loss",)),
    (moe_mutants.no_sum_of_sequence_counts, f"{MOE} parallel.tp=2 parallel.etp=1", ("losses of routers",)),
    (moe_mutants.expert_gradients_divided_by_ep, f"{MOE} parallel.ep=2", ("gradients: experts",)),
]


@pytest.mark.parametrize(
    ("mutant", "words", "rows"),
    [*MUTANTS, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG_MUTANTS)],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_a_mistake_of_some_layout_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mutant: Any, words: str, rows: tuple[str, ...]
) -> None:
    monkeypatch.setattr(plan, "train_rank", partial(with_mistake, mutant))
    assert plan.verify(words.split()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL:") for line in lines)
    assert [what for what in rows if not any(line.startswith(what) and " FAIL " in line for line in lines)] == []


def stopped(how: Callable[[], object], config: Config, place: ProcessEnvironment) -> int:
    if place.rank == 1:
        how()
    return train_rank(config, place)


@pytest.mark.parametrize(
    ("how", "timeout_s", "status", "said"),
    [
        (partial(int, "as told"), 60, 1, ["FAIL: rank 1 failed, exit status 1", "ValueError: invalid literal"]),
        (partial(signal.raise_signal, signal.SIGKILL), 60, 1, ["FAIL: rank 1 failed, exit status -9"]),
        (partial(time.sleep, 60), 6, 1, ["FAIL: rank 0 did not answer in time", "rank 1 did not answer", "in stopped"]),
        (partial(refuse, [Problem("model", "this", "is refused late", "another")]), 60, 2, ["is refused late"]),
    ],
)
def test_a_rank_that_cannot_finish_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: Any,
    timeout_s: float,
    status: int,
    said: list[str],
) -> None:
    monkeypatch.setattr(plan, "train_rank", partial(stopped, how))
    assert plan.verify(["parallel.tp=2", "--dp=1", f"--timeout={timeout_s}"]) == status
    error = capsys.readouterr().err
    assert [text for text in said if text not in error] == [], error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.tp=16"], ["model.num_attention_heads=4: not a multiple of parallel.tp=16"]),
        (["parallel.tp=4", "model.foo=3"], ["model.foo=3: unknown setting"]),
        (["--world-size=6", "parallel.tp=4"], ["world size=6: not a multiple of parallel.tp=4"]),
        (["--world-size=4", "--dp=2"], ["--dp: not allowed with argument --world-size"]),
        (["--dp=0"], ["--dp: 0 must be a whole number from 1"]),
        (["--world-size=1"], ["world size=1: one process is what layouts are compared to"]),
        (["--dp=3"], ["train.global_batch_size=8: not a multiple of 3"]),
        (
            ["optimizer.groups=[{match: '*.routr.*', lr: 0.1x}, {match: 'blocks.3.*', lr: 0.1x}]"],
            ["optimizer.groups='*.routr.*': matches no parameter"],
        ),
        (["parallel.tp=0", "--dp=2", "model.hidden_size=x"], ["parallel.tp=0", "model.hidden_size='x'"]),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]
) -> None:
    assert plan.verify(words) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in said)
    assert f"refused, {len(said)} problem" in error


def test_the_examples_of_the_command_are_layouts_that_it_accepts() -> None:
    examples = re.findall("python -m megalite verify (.*)", plan.verify.function.__doc__ or "")
    assert len(examples) == 2
    for example in examples:
        options, overrides = plan.verify.parse(shlex.split(example))
        assert load(overrides, options.world_size, options.dp)[0].parallel.tp > 1, example


@pytest.mark.parametrize(
    ("words", "dp", "expected"),
    [
        (["parallel.tp=2"], None, 4),
        (["parallel.tp=4"], None, 8),
        (["parallel.tp=4"], 1, 4),
        (["parallel.tp=8", "model.num_attention_heads=8"], None, 8),
        (["parallel.tp=2", "train.global_batch_size=1"], None, 2),
        (["parallel.tp=2", "train.micro_batch_size=8"], None, 2),
        ([], None, 2),
    ],
)
def test_the_world_has_two_copies_where_they_fit(words: list[str], dp: int | None, expected: int) -> None:
    assert load(words, None, dp)[1] == expected


@pytest.mark.parametrize("wrong", ["train.steps=-1", "train.steps=abc", "train.stepz=1"])
@pytest.mark.parametrize("dp", [None, 3])
def test_a_wrong_value_of_another_setting_is_no_flaw_of_the_world(wrong: str, dp: int | None) -> None:
    sizes = ["parallel.pp=17", "model.num_layers=17", "train.global_batch_size=51"]
    with pytest.raises(UserError) as refusal:
        load([*sizes, wrong], None, dp)
    assert [problem.setting for problem in refusal.value.problems] == [wrong.partition("=")[0]]


# --- shrinking -----------------------------------------------------------------------------------------------------


def features(config: Config, world_size: int) -> dict[str, Any]:
    """What a layout can get wrong, as far as sizes say it."""
    model, train, tp = config.model, config.train, config.parallel.tp
    kv_heads, head_size, micro = model.num_key_value_heads, model.head_size, train.micro_batch_size
    vocabulary = vocabulary_of(config)
    rows = -(-vocabulary // model.vocab_multiple) * model.vocab_multiple
    axes = config.parallel
    dp = world_size // tp // axes.cp // axes.pp
    microbatches, groups = train.global_batch_size // (micro * dp), axes.microbatch_group_size
    return {
        "tensor parallel": tp > 1,
        "data parallel": dp > 1,
        "sequence parallel": config.parallel.sequence_parallel,
        "grouped queries": model.num_attention_heads > kv_heads,
        "shared key-value heads": kv_heads < tp,
        "padded vocabulary": rows > vocabulary,
        "uneven rows": rows % tp > 0,
        "width and depth of a base": [size != 1 for size in growth(model)],
        "width of the heads": np.sign(model.num_attention_heads * head_size - model.hidden_size),
        "layers": model.num_layers > 1 or axes.pp > 1,
        "accumulation": microbatches > 1 or microbatches < axes.pp,  # fewer than two ranks is one
        "pipeline": [axes.pp > 1, axes.vpp > 1, axes.schedule],
        "microbatches for all ranks": np.sign(microbatches - axes.pp),
        "short last group": groups is not None and microbatches % groups > 0,
        "several sequences": micro > 1,
        "odd sequence": train.seq_length % tp > 0,
        "chunked loss": model.loss_chunk_tokens is not None,
        "layers recomputed": train.recompute_layers is not None,
        "clipping": config.optimizer.clip_grad > 0,
        "copies of the state": config.optimizer.instances > 1,
        "experts": [model.moe.num_experts, model.moe.top_k, model.moe.num_groups],
        "layers without experts": 0 < len(model.expert_layers) < model.num_layers,
        "axes of experts": [axes.ep > 1, (axes.etp or 1) > 1],
    }


def slopes(config: Config) -> list[int]:
    """Which stages hold more layers than the one before; the first is compared to an empty one."""
    counts = [0, *(stage.count for stage in stage_layers(stage_settings(config)))]
    return [int(np.sign(more - less)) for less, more in pairwise(counts)]


ODD = "model.num_attention_heads=12 model.hidden_size=240 train.seq_length=252"
ASKED: list[tuple[int, str]] = [
    (4, "parallel.tp=2"),
    (8, "model=gpt2 parallel.tp=4 train.recompute=full train.recompute_layers=2"),
    (64, "model=llama3_8b parallel.tp=8 train.global_batch_size=64 model.loss_chunk_tokens=64"),
    (128, "model=gpt3_175b parallel.tp=8 parallel.pp=8 train.global_batch_size=64"),
    (64, "model=llama3_8b parallel.tp=4 optimizer.instances=4 train.global_batch_size=64"),
    (32, "model=llama3_70b parallel.tp=16 train.global_batch_size=8"),  # ranks share key-value heads
    (4, "model.num_attention_heads=8 model.num_key_value_heads=2 parallel.tp=4"),
    (2, "model.vocab_size=5003 model.vocab_multiple=7 parallel.tp=2"),
    (2, "parallel.tp=2 parallel.sequence_parallel=false train.seq_length=255"),
    (2, "model.hidden_size=512 model.head_size=32 train.micro_batch_size=1"),
    (2, "model.mup_base_width=64 model.mup_base_layers=2 parallel.tp=2"),
    (64, "model=llama3_8b parallel.tp=16 model.mup_base_width=1024 model.mup_base_layers=8"),
    (2, "model.hidden_size=64 model.head_size=32 optimizer.clip_grad=0"),
    (3, f"parallel.tp=3 model.ffn_hidden_size=636 {ODD}"),
    (12, f"parallel.tp=6 model.ffn_hidden_size=600 {ODD}"),
    (4, "parallel.pp=4 parallel.schedule=zb-h1"),
    (4, "parallel.pp=4 train.global_batch_size=3 train.micro_batch_size=1"),
    (2, "parallel.pp=2 parallel.vpp=2 parallel.microbatch_group_size=3 train.micro_batch_size=1"),
    (4, "parallel.pp=4 parallel.vpp=2 model.num_layers=24 train.micro_batch_size=1"),
    (4, "parallel.pp=4 model.num_layers=14 parallel.count_embedding=true parallel.count_loss=true"),
    (4, "parallel.pp=4 model.num_layers=12 parallel.standalone_embedding=true"),
    (3, "parallel.pp=3 model.num_layers=4 parallel.first_stage_layers=1 parallel.last_stage_layers=0"),
    (4, "parallel.pp=4 model.num_layers=3 parallel.pipeline_layout=E|tt|t|L"),
    (4, "parallel.cp=4 parallel.cp_comm=alltoall+ring"),
    (32, "model=llama3_8b parallel.cp=8 parallel.tp=2 train.global_batch_size=64"),
    (4, "model=tiny_moe parallel.ep=2"),
    (4, "parallel.tp=2 parallel.ep=2 parallel.etp=2 model.moe.num_experts=4 model.moe.num_shared_experts=1"),
    (6, "parallel.ep=3 model.moe.num_experts=6 model.moe.top_k=6 train.global_batch_size=12"),
    (2, "parallel.ep=2 model.moe.num_experts=4 model.moe.first_dense_layers=1 model.moe.layer_freq=2"),
    (64, "model=qwen3_30b_a3b parallel.tp=2 parallel.ep=8 parallel.etp=1 train.global_batch_size=64"),
    (32, "model=mixtral_8x7b parallel.tp=4 parallel.ep=4 parallel.pp=2 train.global_batch_size=64"),
    (64, "model=deepseek_v3_moe_part parallel.ep=8 train.global_batch_size=64"),
    (4, "device=cuda precision=bf16 optimizer.gradient_dtype=bf16"),
    (4, "device=cuda optimizer.communication_dtype=bf16 optimizer.moment_dtype=bf16 precision=bf16"),
    (4, "device=cuda train.attention=flex"),
    (4, "device=cuda precision=bf16 train.attention=fa4"),
    (4, "device=cuda precision=bf16 parallel.async_tp=true train.compile=true parallel.tp=2"),
]


@pytest.mark.parametrize(("world_size", "words"), ASKED)
def test_shrinking_keeps_every_feature(world_size: int, words: str) -> None:
    config = load_config(words.split(), world_size)
    small, layout, _ = shrink(config, world_size)
    ranks, asked = layout.world_size, features(config, world_size)
    assert not check(small, ranks)
    assert ranks <= MOST_RANKS
    if world_size > MOST_RANKS:  # over two tensor-parallel ranks in place of more
        asked["uneven rows"] = features(small, ranks)["uneven rows"]
        # where etp and ep together need more ranks than one replica has
        asked["data parallel"] |= layout.ep * (layout.etp or 1) > layout.tp * layout.cp
    else:
        assert layout == layout_of(config, world_size)
        assert slopes(small) == slopes(config)
    assert features(small, ranks) == asked
    assert small.model.hidden_size <= 16 * config.model.num_attention_heads


def test_groups_of_layers_that_are_left_out_are_too() -> None:
    """Others stay, in their order; a group that matches nothing in the user's model was refused before."""
    groups = [{"match": f"blocks.{layer}.*", "lr": f"0.{layer + 1}x"} for layer in (3, 0, 1)]
    words = ", ".join(f"{{match: '{group['match']}', lr: {group['lr']}}}" for group in groups)
    config, world = load([f"optimizer.groups=[{words}]", "parallel.tp=2"], None, None)
    assert [len(records) > 0 for records in parameters_of_groups(config)] == [True] * 3
    small, _, alone = shrink(config, world)
    assert small.model.num_layers == 2
    assert small.optimizer.groups == alone.optimizer.groups == groups[1:]


# --- comparing -----------------------------------------------------------------------------------------------------


def write_run(folder: Path, *, norm: float = 0.4, weight: float = 1.0, moment: float = 1e-3) -> Path:
    """What two steps of a training of two parameters leave: the small one, a bias, has one element off `weight`."""
    folder.mkdir()
    lines = [{"step": step, "tokens": 8 * step, "loss": 2.0 / step, "grad_norm": norm} for step in (1, 2)]
    (folder / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    values = {
        "master.blocks.0.mlp.up.weight": torch.arange(12.0, dtype=torch.float64).reshape(6, 2) * 1e3,
        "master.final_norm.bias": torch.tensor([1.0, weight], dtype=torch.float64),
        "exp_avg.blocks.0.mlp.up.weight": torch.ones(6, 2, dtype=torch.float64),
        "exp_avg.final_norm.bias": torch.tensor([1e-3, moment], dtype=torch.float64),
        "momentum.blocks.0.attention.out.weight": torch.full((2, 2), 0.5, dtype=torch.float64),
        "exp_avg_sq.final_norm.bias": torch.full((2,), 9e9, dtype=torch.float64),
    }
    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir()
    for step in (1, 2):
        store.save(checkpoints, step, whole(values), {}, SINGLE, keep=2)
    return folder


@pytest.mark.parametrize(
    ("off", "failed"),
    [
        ({"weight": 1 + 3e-11, "moment": 1e-3 * (1 + 3e-11), "norm": 0.4 * (1 + 3e-11)}, {}),
        ({"norm": 0.4 + 1e-9}, {"gradient norm": "step 1"}),
        ({"norm": float("nan")}, {"gradient norm": "step 1"}),
        ({"weight": 1 + 3e-10}, {"parameters: norms": "final_norm.bias, step 2"}),
        ({"weight": float("nan")}, {"parameters: norms": "final_norm.bias, step 2"}),
        ({"moment": 1e-3 * (1 + 1e-8)}, {"gradients: norms": "final_norm.bias, step 1"}),
    ],
)
def test_each_kind_of_difference_is_found_where_it_is_however_small_the_tensor(
    tmp_path: Path, off: dict[str, float], failed: dict[str, str]
) -> None:
    runs = write_run(tmp_path / "layout", **off), write_run(tmp_path / "single")
    rows = compare(*runs, OptimizerConfig())
    assert {row.what: row.where for row in rows if row.excess > 1} == failed


def test_gradients_are_those_before_clipping_and_before_the_moments_took_their_shares(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "layout"), write_run(tmp_path / "single")
    settings = OptimizerConfig(betas=[0.75, 0.95], clip_grad=0.1, muon=MuonConfig(momentum=0.875))  # norm 0.4: 4 times
    scales = {row.what: row.scale for row in compare(*runs, settings) if row.what.startswith("gradients")}
    wanted = {"mlp": 4 * 1.0 / 0.25, "norms": 4 * 1e-3 / 0.25, "attention": 4 * 0.5 / 0.125}
    assert scales == pytest.approx({f"gradients: {part}": scale for part, scale in wanted.items()}, rel=1e-12)


# --- as a user -----------------------------------------------------------------------------------------------------


def test_the_command_imports_no_torch_before_it_has_refused() -> None:
    code = f"import sys, {plan.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [warm_python(), "-m", "megalite", "verify", "parallel.tp=2", "--dp=1", "run_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PASS: 2 ranks" in done.stdout
    assert list(tmp_path.iterdir()) == []
