"""Sizes of updates in one process, by a plain definition over named tensors, in fp64."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import MoEConfig, MuonConfig
from megalite.launch.context import ParallelContext
from megalite.model.parameters import gpt_parameters
from megalite.optim.update_sizes import elements_of, sizes_of
from megalite.train.build import Training, build_training
from megalite.train.step import TrainStep
from tests.model.small import GPT2_LIKE, random_batch, small
from tests.optim.small_model import small_config

GPT2 = {**GPT2_LIKE, "num_key_value_heads": 2}
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=12)
PATTERN = "blocks.1.attention.*"
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"model": GPT2},
    "untied": {"model": {"tie_embeddings": False, "vocab_size": 53, "vocab_multiple": 8}},
    "muon": {"model": GPT2, "optimizer": {"name": "muon"}},
    "router": {"model": {"moe": MOE}, "optimizer": {"name": "muon", "muon": MuonConfig(router=False)}},
    "groups": {"optimizer": {"name": "muon", "qk_clip": 0.01, "groups": [{"match": PATTERN, "lr": "3x"}]}},
}
TOKENS = 64


def masters_of(training: Training) -> dict[str, Tensor]:
    """Copies by name."""
    masters = zip(training.buffers.layout.buckets, training.buffers.masters, strict=True)
    places = ((slot, master) for bucket, master in masters for slot in bucket.slots)
    return {slot.record.name: master[slot.start : slot.stop].view(slot.shard.shape).clone() for slot, master in places}


def layer_and_group(case: str, name: str, shape: tuple[int, ...]) -> tuple[str, str]:
    part = re.sub(r"blocks\.(\d+)\..*", r"block_\1", name)
    if case == "groups" and name.startswith("blocks.1.attention."):
        return part, PATTERN
    if name.endswith("bias") or "norm" in name:
        return part.split(".")[0], "norms_and_biases"
    if not part.startswith("block_"):
        return part.split(".")[0], "embedding_and_head"
    adamw = case in ("adamw", "untied") or "router" in name
    return part, "adamw_matrices" if adamw else "muon_matrices"


def plainly(case: str, before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for at, prefix in enumerate(("", "group_")):
        names: dict[str, list[str]] = {}
        for name, value in before.items():
            names.setdefault(layer_and_group(case, name, value.shape)[at], []).append(name)
        for place, its in names.items():
            update = torch.cat([(after[name] - before[name]).flatten() for name in its])
            weights = torch.cat([after[name].flatten() for name in its])
            for what, value in (
                ("update_rms", update.square().mean().sqrt()),
                ("update_norm", update.norm()),
                ("weight_rms", weights.square().mean().sqrt()),
            ):
                found.setdefault(prefix + what, {})[place] = float(value)
    return found


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_those_of_masters_before_and_after(case: str) -> None:
    config = small_config(**{"optimizer": {"lr": 0.02}, "log": {"update_sizes": True}, **CASES[case]})
    config.precision, context = "fp64", ParallelContext(dtype=torch.float64)
    training, generator = build_training(config, context), torch.Generator().manual_seed(7)
    records = gpt_parameters(config.model)
    training.buffers.fill((one.name, 0.3 * torch.randn(one.shape, generator=generator)) for one in records)
    step, batches = TrainStep(training, config.optimizer, context), [random_batch(small(vocab_size=50), s=8)]
    for tokens in (TOKENS, TOKENS, 0):  # the last step is skipped
        before = masters_of(training)
        metrics = step(batches, tokens, 0.02, measures=True).read()
        after = masters_of(training)
        assert metrics.squares is not None
        found = sizes_of(metrics.squares, elements_of(config))
        torch.testing.assert_close(found, plainly(case, before, after), rtol=1e-12, atol=0)
        moved = [value > 0 for name, values in found.items() if "update" in name for value in values.values()]
        assert moved == [tokens > 0] * len(moved)
        assert metrics.skipped == (tokens == 0)
    assert step(batches, TOKENS, 0.02).read().squares is None
