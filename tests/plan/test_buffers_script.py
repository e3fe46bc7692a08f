"""`megalite plan buffers` shows what training lays out, as tables, and tells mistakes all at once."""

import re
from pathlib import Path
from typing import Any

import pytest

from megalite.commands import plan
from megalite.config.schema import MoEConfig
from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import BufferLayout, OwnedRange
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.optim.rank_buffers import rank_buffers
from tests.optim.small_model import small_config
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
GPT2 = ("model=gpt2", "model.vocab_size=50257", "precision=bf16")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert plan.buffers(arguments) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan.buffers(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def laid_out(context: ParallelContext, sections: dict[str, Any]) -> tuple[BufferLayout, tuple[OwnedRange, ...]]:
    from megalite.train.build import build_training

    buffers = build_training(small_config(**sections), context).buffers
    return buffers.layout, buffers.owned


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (ParallelLayout(tp=2, dp=2), {"parallel": {"tp": 2}, "optimizer": {"bucket_size": 500}}),
        (ParallelLayout(dp=4), {"optimizer": {"instances": 2, "ownership": "whole"}}),
        (
            ParallelLayout(tp=2, dp=2, ep=2, etp=1),
            {"parallel": {"tp": 2, "ep": 2, "etp": 1}, "model": {"moe": MoEConfig(num_experts=4)}},
        ),
    ],
)
def test_every_rank_has_the_buffers_that_training_gives_it(world: ParallelLayout, sections: dict[str, Any]) -> None:
    config = small_config(**sections)
    needs = GroupNeeds(optimizer_instances=config.optimizer.instances)
    for rank, found in enumerate(run_ranks(laid_out, world.world_size, sections, layout=world, needs=needs)):
        buffers = rank_buffers(config, world, rank)
        assert (buffers.layout, buffers.layout.owned(**buffers.index)) == found


def test_experts_have_axes_buckets_and_owners_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("model=tiny_moe", "tokenizer=byte", "precision=bf16", "--world-size", "8", "parallel.ep=4")
    lines = shown(capsys, *sizes, "--rank", "5")
    assert lines[:2] == ["tiny_moe, 8 ranks: dp 8, order tp-cp-ep-dp-pp, bf16, vocabulary 257", "experts: ep 4 x edp 2"]
    assert "experts: every bucket is cut into 2 slices, owned by the ranks 1, 5" in lines
    assert any(line.split()[:2] == ["1", "master"] for line in lines)  # the routers
    (expert,) = (line for line in lines if line.startswith("0 expert"))
    assert expert.split()[2] == f"{4 * 2 * 3 * 256 * 352:,}"  # layers, experts here, matrices
    assert refused(capsys, *sizes, "model.moe.num_experts=6").count("not a multiple of parallel.ep=4") == 1


def test_gpt2_on_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *GPT2, "--dp", "4")
    rows = [re.split(r"  +", line.strip()) for line in lines[lines.index("") + 1 :]]
    assert lines[0] == "gpt2, 4 ranks: dp 4, bf16, vocabulary 50,257"
    assert rows[0] == ["bucket", "elements", "padding", "slice", "tensors", "MiB kept", "from .. to"]
    assert rows[1][:4] == ["0", "35,440,896", "0", "8,860,224"]
    assert rows[1][-1] == "final_norm.bias .. blocks.7.attention_norm.weight"
    assert rows[-2][:6] == ["3", "38,633,472", "0", "9,658,368", "1", "331.6"]
    assert rows[-1] == ["all", "124,475,904", "0", "31,118,976", "148", f"{124_475_904 * (6 + 12 / 4) / 2**20:,.1f}"]


def test_with_muon_the_work_of_ranks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A block of GPT-2 has four matrices with sides of 768 (q, k, v and out), and two of 768 by 3,072."""
    square, wide = 6 * 768**3 / 1e9, 18 * 768**3 / 1e9
    whole = 12 * (4 * square + 2 * wide)
    of_rank = "a polynomial of Muon's takes {:,.4g} to {:,.4g} GFLOP on a rank, {:,.4g} on average"
    assert of_rank.format(*[whole / 4] * 3) in shown(capsys, *GPT2, "optimizer=muon", "--dp", "4")
    # An owner has four of the 48 stored matrices: of q, k and v, of out and two wide ones, for two ranks of tp.
    lines = shown(capsys, *GPT2, "optimizer=muon", "parallel.tp=2", "--dp", "12", "train.global_batch_size=48")
    assert of_rank.format(wide + square, 2 * wide, whole / 24) in lines
    experts = [
        line for line in shown(capsys, "model=tiny_moe", "optimizer=muon", "--world-size", "2") if "GFLOP" in line
    ]
    assert [line.startswith("experts: ") for line in experts] == [True, False]
    assert not any("polynomial" in line for line in shown(capsys, *GPT2, "optimizer.ownership=whole", "--dp", "4"))


@pytest.mark.parametrize(
    ("arguments", "owners"),
    [
        ("--dp 2 optimizer.zero=0", "rank 0 owns all of every bucket: the optimizer's state is not sharded"),
        ("parallel.tp=2 --rank 3", "every bucket is cut into 2 slices, owned by the ranks 1, 3"),
        (
            "--world-size 8 optimizer.instances=2 --rank 7",
            "every bucket is cut into 4 slices, owned by the ranks 4, 5, 6, 7",
        ),
    ],
)
def test_owners_are_named(arguments: str, owners: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert owners in shown(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("model.num_layers=0", "optimizer.zero=2", "--dp", "2"),
            ("2 problems", "model.num_layers=0", "optimizer.zero=2"),
        ),
        (
            ("optimizer.groups=[{match:'*.routr.*',lr:0.1x},{match:'*norm*',weight_decay:0}]",),
            ("1 problem", "optimizer.groups='*.routr.*': matches no parameter of the model"),
        ),
        (("--rank", "2"), ("--rank=2: there are 2 ranks, counted from 0",)),
        (("--world-size", "4", "--dp", "2"), ("--dp: not allowed with argument --world-size",)),
    ],
)
def test_what_cannot_be_laid_out_is_refused_all_at_once(
    arguments: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *arguments)
    assert all(part in said for part in parts)
