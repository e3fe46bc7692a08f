"""Run folders as training leaves them, of any size, without training."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from megalite.config.schema import Config
from megalite.config.settings import as_plain
from megalite.layout.ranks import ParallelLayout

EVIL = "<script>alert('x')</script>"
BEGAN = 1_790_000_000.0


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    planned: int | None = None,
    every: int = 1,
    layout: ParallelLayout | None = None,
    lr: float = 1e-3,
    mfu: float | None = None,
    events: list[dict[str, Any]] | None = None,
    seed: int = 0,
) -> Path:
    """A run of `steps` steps, a line for every `every`-th, evaluated a few times. `events` follow its start."""
    layout = layout or ParallelLayout()
    folder.mkdir(parents=True)
    config = Config(run_dir=str(folder))
    config.train = replace(config.train, steps=planned or steps)
    config.optimizer = replace(config.optimizer, lr=lr)
    (folder / "config.yaml").write_text(yaml.safe_dump(as_plain(config)))
    lines = [*metrics(steps, every, lr, mfu, seed)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = [start_of(layout, folder), *(events or [])]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return folder


def metrics(steps: int, every: int, lr: float, mfu: float | None, seed: int) -> Iterator[dict[str, Any]]:
    dice, training_s = random.Random(seed), 0.0
    for step in range(1, steps + 1):
        noise = dice.gauss(0, 0.08)
        if step % every == 0 or step == steps:
            loss = 2.0 + 6.5 * math.exp(-8 * step / steps) + noise
            seconds = 0.4 * (1 + abs(dice.gauss(0, 0.05)))
            training_s += every * seconds
            shares = {"data": 0.01, "forward": 0.3, "backward": 0.5, "communication": 0.12, "optimizer": 0.05}
            split = {part: share * seconds * (1 + abs(noise)) for part, share in shares.items()}
            yield {
                "step": step,
                "tokens": step * 2048,
                "loss": math.nan if step == 7 * every else loss,
                "lr": lr * min(1.0, 20 * step / steps) * (1 + math.cos(math.pi * step / steps)) / 2,
                "grad_norm": 0.5 + 4 * math.exp(-10 * step / steps) + abs(noise),
                "tokens_per_s": 2048 / seconds,
                "mean_tokens_per_s": step * 2048 / training_s,
                "step_time_s": seconds,
                "training_s": training_s,
                "memory_gib": 1.2,
                "data_wait_share": 0.01,
                "time_split": split | {"other": 0.02 * seconds},
                "mfu": mfu and mfu / seconds,
                "mfu_causal": mfu and 0.9 * mfu / seconds,
                "bad_steps": int(step >= 7 * every),
            }
        if step % max(1, steps // 5) == 0:
            loss = 2.2 + 6.2 * math.exp(-8 * step / steps)
            perplexity, bits = math.exp(loss), loss / 2.5
            evaluation = {"val_loss": loss, "val_perplexity": perplexity, "val_bits_per_byte": bits}
            yield {"step": step, "tokens": step * 2048, **evaluation, "eval_time_s": 1.5}


def start_of(layout: ParallelLayout, folder: Path, *, kind: str = "start", step: int = 0) -> dict[str, Any]:
    ranks = layout.world_size
    return {
        "time": BEGAN + step,
        "step": step,
        "kind": kind,
        "command": f"torchrun pretrain_gpt.py run_dir={folder} model=gpt2",
        "overrides": [f"run_dir={folder}", "model=gpt2"],
        "about": [["model", "gpt2: 124,439,808 parameters"], ["data", f"text: {EVIL}"]],
        "versions": {"python": "3.11.2", "torch": "2.13.0", "system": "Linux"},
        "device": "NVIDIA H200",
        "layout": asdict(layout),
        "hosts": [f"node{rank // 8}" for rank in range(ranks)],
        "ranks_per_node": min(ranks, 8),
        "changes": [],
    }


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"time": BEGAN + step, "step": step, "kind": kind, **fields}
