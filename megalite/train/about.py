"""What a run was resolved to: for the header on the terminal, and for the event with which each start begins."""

import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from megalite.config.step_plan import batch_ramp
from megalite.model.flops import flops_per_token, parameter_count
from megalite.parallel.environment import launch_command, read_environment
from megalite.parallel.tables import header_lines
from megalite.train.job import Job

PACKAGES = (
    "megalite",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "hydra-core",
    "numpy",
    "safetensors",
    "wandb",
)


def resolved(job: Job) -> list[tuple[str, str]]:
    """(label, text) of everything that was resolved."""
    train, model = job.config.train, job.config.model
    ramp, progress = batch_ramp(train), job.progress
    tokens_per_step = train.global_batch_size * train.seq_length
    samples = ramp.samples_after(max(0, train.steps - progress.step), progress.samples)
    growth = "" if train.batch_ramp is None else f"; growing from {ramp.start} sequences by {ramp.increment}"
    flops = flops_per_token(model, train.seq_length, causal=False)
    epochs = samples / job.data.train.samples
    rows = [
        ("model", f"{model.name}: {parameter_count(model):,} parameters, {flops / 1e6:,.1f} MFLOP per token"),
        (
            "",
            f"{model.num_layers} layers, {model.hidden_size} wide, {model.num_attention_heads} heads, "
            f"vocabulary {model.vocab_size:,}",
        ),
        (
            "batch",
            f"{tokens_per_step:,} tokens per step: {train.global_batch_size} sequences of {train.seq_length}, "
            f"{train.micro_batch_size} at a time{growth}",
        ),
        ("data", job.data.description),
        ("", f"{samples * train.seq_length:,} tokens in {train.steps:,} steps: {epochs:.3g} epochs"),
        *zip(("layout", "", ""), header_lines(job.context.layout), strict=False),
        ("device", f"{device_name(job)}, {str(job.context.dtype).removeprefix('torch.')}"),
        ("run folder", str(job.folder.path)),
    ]
    if job.resumed_from is not None:
        rows.append(("continues", f"from the checkpoint of step {job.resumed_from}"))
    return rows


def device_name(job: Job) -> str:
    device = job.context.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} thread(s) per rank"


def start_fields(job: Job, hosts: list[str]) -> dict[str, Any]:
    """What the event of a start says besides its time: how to start it again, and on what it runs. `hosts`: by rank."""
    return {
        "command": launch_command(read_environment(os.environ), sys.argv),
        "overrides": [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")],
        "about": [[label, text] for label, text in resolved(job)],
        "versions": versions(),
        "device": device_name(job),
        "layout": asdict(job.context.layout),
        "hosts": hosts,
        "ranks_per_node": hosts.count(hosts[0]),
        "changes": job.folder.changes,
    }


def versions() -> dict[str, str]:
    """Of what computes, by name; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its build
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
