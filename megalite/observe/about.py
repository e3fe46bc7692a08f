"""Says what a run was resolved to: in the header on the terminal, and in the event with which each start begins."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megalite import __version__
from megalite.config.schema import ModelConfig
from megalite.config.step_plan import batch_ramp
from megalite.data.open import paths_of
from megalite.errors.words import several
from megalite.launch.device import name_of
from megalite.launch.environment import launch_command, read_environment
from megalite.layout.summary import header_lines
from megalite.model.flops import active_parameters, flops_per_token, parameter_count
from megalite.train.setup import Job

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "hydra-core", "numpy", "safetensors")
SUBMITTED = "MEGALITE_COMMAND"  # set by a batch script: what submits it again
MOST_NAMED = 4  # token files of a blend


def start_fields(job: Job) -> dict[str, Any]:
    """The fields of a start's event: how to start the run again, and on what it runs."""
    device = f"CPU, {several(torch.get_num_threads(), 'thread')} per rank"
    if job.context.device.type == "cuda":
        device = torch.cuda.get_device_name(job.context.device)
    return {
        "command": os.environ.get(SUBMITTED) or launch_command(read_environment(os.environ), sys.argv),
        "overrides": [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")],
        "about": [[label, text] for label, text in resolved(job, device)],
        "versions": versions(),
        "device": device,
        "layout": asdict(job.context.layout),
        "hosts": job.hosts,
        "ranks_per_node": job.hosts.count(job.hosts[0]),
        "changes": job.folder.changes,
    }


def resolved(job: Job, device: str) -> list[tuple[str, str]]:
    """(label, text) of everything that was resolved."""
    train, model, done = job.config.train, job.config.model, job.progress
    ramp = batch_ramp(train)
    samples = ramp.samples_after(max(0, train.steps - done.step), done.samples)
    growth = (
        [] if train.batch_ramp is None else [("", f"growing from {ramp.sizes.start} sequences by {ramp.sizes.step}")]
    )
    flops = flops_per_token(model, train.seq_length, causal=False)
    paths = paths_of(job.config.data) if len(job.data.train.parts) > 1 else []
    shape = f"{several(model.num_layers, 'layer')}, hidden size {model.hidden_size:,}"
    heads = f"{several(model.num_attention_heads, 'attention head')}, vocabulary of {model.vocab_size:,} tokens"
    batch = f"{train.global_batch_size * train.seq_length:,} tokens per step"
    sequences = f"{several(train.global_batch_size, 'sequence')} of {train.seq_length:,} tokens"
    parameters = f"{parameter_count(model):,} parameters"
    if model.moe.num_experts:
        parameters += f", of which a token meets {active_parameters(model):,}"
    epochs = epochs_in_words(job.data.train.epochs(samples), paths)
    rows = [
        ("model", f"{model.name}: {parameters}, {flops / 1e6:,.1f} MFLOP per token"),
        ("", f"{shape}, {heads}"),
        *([("", experts_in_words(model))] if model.moe.num_experts else []),
        ("batch", f"{batch}: {sequences}, {train.micro_batch_size} in a microbatch"),
        *growth,
        ("data", job.data.description),
        ("", f"{samples * train.seq_length:,} tokens in {several(train.steps, 'step')}: {epochs}"),
        *zip(("layout", "", ""), header_lines(job.context.layout), strict=False),
        ("device", f"{device}, {name_of(job.context.dtype)}"),
        ("run folder", str(job.folder.path)),
    ]
    if job.resumed_from is not None:
        rows.append(("continues", f"from the checkpoint of step {job.resumed_from}"))
    return rows


def experts_in_words(model: ModelConfig) -> str:
    """The experts of a layer, and which layers have some."""
    moe, layers = model.moe, len(model.expert_layers)
    where = "each layer" if layers == model.num_layers else f"{layers} of them"
    shared = f" and {moe.num_shared_experts} shared" if moe.num_shared_experts else ""
    inner = f"inner width {moe.ffn_hidden_size:,}"
    return f"{several(moe.num_experts, 'expert')}{shared} in {where}, top {moe.top_k}, {inner}"


def epochs_in_words(epochs: Sequence[float], paths: Sequence[str]) -> str:
    """The epochs of each token file of a blend, the most repeated file first: a mean would hide it."""
    if len(epochs) == 1:
        return several(epochs[0], "epoch")
    parts = sorted(zip(epochs, paths, strict=True), reverse=True)
    most = [f"{count:.3g} of {Path(path).name}" for count, path in parts]
    return "epochs: " + ", ".join([*most[:MOST_NAMED], *(["fewer of the rest"] if len(most) > MOST_NAMED else [])])


def versions() -> dict[str, str]:
    """Versions by name of what computes; a package that is not installed is left out."""
    found = {"megalite": __version__, **commit(), "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
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
        described = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": described.stdout.strip().replace("-dirty", ", with changes that are not committed")}
