"""What a run was resolved to: for the header on the terminal, and for the event with which each start begins."""

import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megalite import __version__
from megalite.config.step_plan import batch_ramp
from megalite.data.open import paths_of
from megalite.launch.device import name_of
from megalite.launch.environment import launch_command, read_environment
from megalite.layout.summary import header_lines
from megalite.model.flops import flops_per_token, parameter_count
from megalite.observe.readable import several
from megalite.train.job import Job

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "hydra-core",
    "numpy",
    "safetensors",
    "wandb",
    "tensorboard",
)
PARTS = 4  # of a blend that are named


def resolved(job: Job) -> list[tuple[str, str]]:
    """(label, text) of everything that was resolved."""
    train, model = job.config.train, job.config.model
    ramp, progress = batch_ramp(train), job.progress
    tokens_per_step = train.global_batch_size * train.seq_length
    samples = ramp.samples_after(max(0, train.steps - progress.step), progress.samples)
    growth = [] if train.batch_ramp is None else [("", f"growing from {ramp.start} sequences by {ramp.increment}")]
    flops = flops_per_token(model, train.seq_length, causal=False)
    paths = paths_of(job.config.data) if len(job.data.train.parts) > 1 else []
    epochs = epochs_in_words(job.data.train.epochs(samples), paths)
    rows = [
        ("model", f"{model.name}: {parameter_count(model):,} parameters, {flops / 1e6:,.1f} MFLOP per token"),
        (
            "",
            f"{several(model.num_layers, 'layer')}, hidden size {model.hidden_size:,}, "
            f"{several(model.num_attention_heads, 'attention head')}, vocabulary of {model.vocab_size:,} tokens",
        ),
        (
            "batch",
            f"{tokens_per_step:,} tokens per step: {several(train.global_batch_size, 'sequence')} of "
            f"{train.seq_length:,} tokens, {train.micro_batch_size} in a microbatch",
        ),
        *growth,
        ("data", job.data.description),
        ("", f"{samples * train.seq_length:,} tokens in {train.steps:,} steps: {epochs}"),
        *zip(("layout", "", ""), header_lines(job.context.layout), strict=False),
        ("device", f"{device_name(job)}, {name_of(job.context.dtype)}"),
        ("run folder", str(job.folder.path)),
    ]
    if job.resumed_from is not None:
        rows.append(("continues", f"from the checkpoint of step {job.resumed_from}"))
    return rows


def epochs_in_words(epochs: list[float], paths: list[str]) -> str:
    """Of each part of a blend, that which is repeated most first: a mean would hide it."""
    if len(epochs) == 1:
        return f"{epochs[0]:.3g} epochs"
    most = sorted(zip(epochs, paths, strict=True), reverse=True)
    more = f", fewer of {len(most) - PARTS} more" if len(most) > PARTS else ""
    return "epochs: " + ", ".join(f"{count:.3g} of {Path(path).name}" for count, path in most[:PARTS]) + more


def device_name(job: Job) -> str:
    device = job.context.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {several(torch.get_num_threads(), 'thread')} per rank"


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
    found = {"megalite": __version__, **commit(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its build
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def commit(checkout: Path = Path(__file__).parents[2]) -> dict[str, str]:
    """The git commit of the checkout that megalite runs from; nothing where it is installed, or git is not."""
    if not (checkout / ".git").exists():
        return {}
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=-dirty"]
    try:
        said = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": said.stdout.strip().replace("-dirty", ", with changes that are not committed")}
