"""Norms by layer are those of the outputs of the model's parts and of the gradients, by their plain definition in fp64;
training is the same with and without them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.derive import derive
from megalite.launch.context import ParallelContext
from megalite.model.parameters import gpt_parameters
from megalite.observe.run_data import read_run
from megalite.optim.layer_norms import norms_of
from megalite.train.build import build_training
from megalite.train.step import TrainStep
from tests.config.refusal import refusal
from tests.optim.small_model import small_config
from tests.optim.test_update_sizes import TOKENS, random_batch, small
from tests.train.runs import metrics, state_bytes, write_text
from tests.train.test_run import config_for, start

NAMES = ("embedding", "block_0", "block_1", "final_norm", "head")


def rms(values: list[Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in values]).double().square().mean().sqrt())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_norms_are_those_of_outputs_and_gradients(recompute: str) -> None:
    sections: dict[str, Any] = {"model": {"tie_embeddings": False}, "train": {"recompute": recompute}}
    config = small_config(**{"log": {"layer_norms_interval": 1}, "optimizer": {"clip_grad": 0}, **sections})
    config.precision, context = "fp64", ParallelContext(dtype=torch.float64)
    training, generator = build_training(config, context), torch.Generator().manual_seed(7)
    records = gpt_parameters(config.model)
    training.buffers.fill((it.name, 0.3 * torch.randn(it.shape, generator=generator)) for it in records)
    [model], seen = training.chunks, {name: list[Tensor]() for name in NAMES}
    modules = {"embedding": model.embedding, "final_norm": model.final_norm}
    modules |= {f"block_{layer}": block for layer, block in model.blocks.items()}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, __, output, name=name: seen[name].append(output.detach().clone()))
    step, layers = TrainStep(training, config.optimizer, context), training.layer_norms
    assert layers is not None
    batches = [random_batch(small(vocab_size=50), s=8) for _ in range(2)]
    tokens = sum(batch.tokens.numel() for batch in batches)
    for _ in range(2):
        for outputs in seen.values():
            outputs.clear()
        with layers.watching():
            found = step(batches, TOKENS, 0.02, layers=layers).read().layers
        assert found is not None
        norms = norms_of(found, config, tokens, 1.0)
        if recompute == "full":  # backward has computed blocks once more, the same
            seen = {name: outputs[: len(batches)] for name, outputs in seen.items()}
        wanted = {name: rms(outputs) for name, outputs in seen.items() if outputs}
        assert norms["activation_rms"] == pytest.approx(wanted, rel=1e-12)
        places = training.buffers.places
        for name in NAMES:
            its = [one for one in places if one.startswith(name.replace("block_", "blocks."))]
            gradients = [training.buffers.gradient(one) for one in its]
            assert norms["gradient_rms"][name] == pytest.approx(rms(gradients), rel=1e-12)
        assert list(norms["gradient_rms"]) == list(NAMES)
    assert step(batches, TOKENS, 0.02).read().layers is None


def test_lines_of_these_steps_alone_hold_norms_and_training_is_the_same(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    for name, interval in (("measured", 4), ("plain", 0)):
        config = config_for(text, tmp_path / name, steps=9, log_interval=2, sample_tokens=0)
        config.log = replace(config.log, layer_norms_interval=interval)
        assert start(derive(config)) == 0
    assert metrics(tmp_path / "measured") == metrics(tmp_path / "plain")
    assert state_bytes(tmp_path / "measured", 8) == state_bytes(tmp_path / "plain", 8)
    lines = [json.loads(line) for line in (tmp_path / "measured" / "metrics.jsonl").read_text().splitlines()]
    known = {line["step"]: line["gradient_rms"] for line in lines if "gradient_rms" in line}
    assert list(known) == [4, 8]
    assert known[4].keys() == {"embedding", "block_0", "final_norm"}
    shown = read_run(tmp_path / "measured")
    assert shown.damage == []
    assert len(shown.series["activation_rms/block_0"].points()) == 2
    line = next(line for line in lines if line["step"] == 8 and "loss" in line)
    counts = {"embedding": 384 * 16, "final_norm": 16, "block_0": 8256 - 257 * 16 - 16}  # with rows of padding
    assert line["grad_norm"] > 1.1  # which was clipped to 1
    squares = sum(count * known[8][name] ** 2 for name, count in counts.items())
    assert squares**0.5 == pytest.approx(line["grad_norm"], rel=1e-5)


def test_what_no_line_would_hold_and_what_cannot_be_seen_is_refused() -> None:
    said = str(refusal("log.layer_norms_interval=3", "train.log_interval=2"))
    assert "log.layer_norms_interval=3" in said
    assert "not a multiple of train.log_interval=2" in said
    assert "train.cuda_graph" in str(refusal("log.layer_norms_interval=10", "train.cuda_graph=true", "device=cuda"))
