"""Where memory runs out, a file says who has it: by part of the model, of the real buffers; and torch's snapshot."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.derive import derive
from megalite.launch.context import ParallelContext
from megalite.model.gpt import GPT
from megalite.train import owners as module
from megalite.train.build import Training, build_training
from megalite.train.owners import owners, write_memory
from tests.ranks import run_ranks
from tests.train.test_run import config_for, start

WIDTH = 64


def training_of(context: ParallelContext, text: Path, precision: str, **optimizer: Any) -> Training:
    config = config_for(text, text.parent / "unused")
    config.precision, config.model = precision, replace(config.model, num_layers=2, hidden_size=WIDTH, vocab_size=257)
    config.model = replace(config.model, num_key_value_heads=2, head_size=32, ffn_hidden_size=192)
    config.optimizer = replace(config.optimizer, **optimizer)
    return build_training(derive(config, context.world_size), context)


BLOCK = 2 * WIDTH + 4 * WIDTH**2 + 3 * WIDTH * 192  # norms, attention, gated MLP
TABLE = 384 * WIDTH


def test_each_kind_has_its_bytes_by_part(text: Path) -> None:
    """In bf16: 2 bytes of parameters, 4 of gradients, masters and each moment; in fp32 masters are the parameters."""
    elements = {"blocks.0": BLOCK, "blocks.1": BLOCK, "embedding": TABLE, "final_norm": WIDTH}
    found = owners(training_of(ParallelContext(dtype=torch.bfloat16), text, "bf16", ema_half_life_steps=9.0))
    sizes = {"parameters": 2, **dict.fromkeys(("gradients", "masters", "averages", "exp_avg", "exp_avg_sq"), 4)}
    wanted = {f"{kind} of {part}": size * count for kind, size in sizes.items() for part, count in elements.items()}
    assert found == wanted
    alone = owners(training_of(ParallelContext(), text, "fp32"))
    assert sum(alone.values()) == 16 * sum(elements.values())
    assert not any("masters" in owner or "averages" in owner for owner in +alone)


def on_rank(context: ParallelContext, text: Path) -> dict[str, int]:
    return dict(owners(training_of(context, text, "bf16", zero=1)))


def test_ranks_have_their_share_of_the_state(text: Path) -> None:
    both = sum((Counter(of) for of in run_ranks(on_rank, 2, text, dtype=torch.bfloat16)), Counter[str]())
    assert both["parameters of blocks.1"] == 2 * 2 * BLOCK
    assert both["exp_avg of blocks.1"] == 4 * BLOCK


def test_the_ten_largest_and_the_rest_are_written_with_torchs_snapshot(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for a GPU's allocator."""
    training = training_of(ParallelContext(dtype=torch.bfloat16), text, "bf16")
    known, dumped = owners(training), list[str]()
    monkeypatch.setattr(module.torch.cuda, "memory_allocated", lambda: known.total() + 2**30)
    monkeypatch.setattr(module.torch.cuda.memory, "_dump_snapshot", dumped.append)
    lines = write_memory(training, tmp_path, 3, cuda=True).read_text().splitlines()
    assert dumped == [str(tmp_path / "memory-rank-00003.pickle")]
    assert lines[0] == "     1.000 GiB  activations, workspaces and all else"
    assert [line.split("GiB  ")[1] for line in lines[1:]] == [owner for owner, _ in known.most_common(9)]


def test_a_run_that_has_no_memory_left_names_the_file(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(self: GPT, *args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GPT, "loss", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        start(replace(config_for(text, tmp_path / "run"), train=config_for(text, tmp_path, micro_batch_size=1).train))
    said = capsys.readouterr().err
    found = re.search(r"megalite: rank 0: the largest owners of memory: (.*)", said)
    assert found
    assert Path(found[1]) == tmp_path / "run" / "logs" / "memory-rank-00000.txt"
    lines = Path(found[1]).read_text().splitlines()
    assert re.fullmatch(r" +0.000 GiB  (parameters|gradients|exp_avg|exp_avg_sq) of embedding", lines[0])
    assert len(lines) == 10
