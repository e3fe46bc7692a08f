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
    layout: ParallelLayout | None = None,
    lr: float = 1e-3,
    mfu: float | None = None,
    events: list[dict[str, Any]] | None = None,
    seed: int = 0,
) -> Path:
    """A run of `steps` steps, evaluated a few times. `events` follow its start."""
    folder.mkdir(parents=True)
    config = Config(run_dir=str(folder))
    config.train = replace(config.train, steps=steps)
    config.optimizer = replace(config.optimizer, lr=lr)
    (folder / "config.yaml").write_text(yaml.safe_dump(as_plain(config)))
    told = [start_of(layout or ParallelLayout(), folder), *(events or [])]
    for name, lines in (("metrics.jsonl", metrics(steps, lr, mfu, seed)), ("events.jsonl", told)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def metrics(steps: int, lr: float, mfu: float | None, seed: int) -> Iterator[dict[str, Any]]:
    dice, training_s = random.Random(seed), 0.0
    shares = {"data": 0.01, "forward": 0.3, "backward": 0.5, "communication": 0.12, "optimizer": 0.05, "other": 0.02}
    for step in range(1, steps + 1):
        falling, noise = math.exp(-8 * step / steps), dice.gauss(0, 0.08)
        seconds = 0.4 * (1 + abs(dice.gauss(0, 0.05)))
        training_s += seconds
        yield {
            "step": step,
            "tokens": step * 2048,
            "loss": math.nan if step == 7 else 2.0 + 6.5 * falling + noise,
            "lr": lr * min(1.0, 20 * step / steps) * (1 + math.cos(math.pi * step / steps)) / 2,
            "grad_norm": 0.5 + 4 * falling + abs(noise),
            "tokens_per_s": 2048 / seconds,
            "mean_tokens_per_s": step * 2048 / training_s,
            "step_time_s": seconds,
            "training_s": training_s,
            "memory_gib": 1.2,
            "data_wait_share": 0.01,
            "time_split": {part: share * seconds for part, share in shares.items()},
            "mfu": mfu and mfu / seconds,
            "mfu_causal": mfu and 0.9 * mfu / seconds,
            "bad_steps": int(step >= 7),
        }
        if step % max(1, steps // 5) == 0:
            loss = 2.2 + 6.2 * falling
            evaluation = {"val_loss": loss, "val_perplexity": math.exp(loss), "val_bits_per_byte": loss / 2.5}
            yield {"step": step, "tokens": step * 2048, **evaluation, "eval_time_s": 1.5}


def sizes_at(step: int, layers: int = 2) -> dict[str, Any]:
    """What a line of a step holds beside all else with log.update_sizes and optimizer.qk_clip; step 5 was skipped."""
    names = ["embedding", *(f"block_{layer}" for layer in range(layers)), "final_norm"]
    groups, size = ["embedding_and_head", "muon_matrices", "*.router.*"], 0.0 if step == 5 else 1e-3 / step
    logits = {str(layer): 3.0 + step + layer for layer in range(layers)}
    return {
        "update_rms": {name: size * at for at, name in enumerate(names, 1)},
        "update_norm": dict.fromkeys(names, 30 * size),
        "weight_rms": dict.fromkeys(names, 0.02),
        "group_update_rms": dict.fromkeys(groups, size),
        "group_update_norm": dict.fromkeys(groups, 30 * size),
        "group_weight_rms": dict(zip(groups, (0.02, 0.04, 0.0), strict=True)),
        "activation_rms": dict.fromkeys(names, 1.5),
        "gradient_rms": dict.fromkeys(names, 10 * size),
        "max_attention_logit": max(logits.values()),
        "layer_attention_logit": logits,
    }


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
