"""Says what a run was resolved to: in the header on the terminal, and in the event with which each start begins."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megalite import __version__
from megalite.config.step_plan import batch_sizes, samples_after
from megalite.errors.problems import several
from megalite.launch.device import PRECISIONS
from megalite.launch.environment import launch_command, read_environment
from megalite.layout.ranks import header_lines
from megalite.model.flops import active_parameters, flops_per_token, parameter_count
from megalite.observe.alerts import open_alerts
from megalite.observe.prometheus import Prometheus
from megalite.observe.report.page import REPORT, live_report
from megalite.observe.run_data import read_run
from megalite.observe.terminal import Terminal
from megalite.observe.trackers import open_trackers
from megalite.plan.gpu_memory import rank_memory
from megalite.plan.horizon import length_words
from megalite.train.history import Note, View
from megalite.train.loop import Job

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "hydra-core", "numpy", "safetensors")


def open_views(job: Job, terminal: Terminal, note: Note) -> dict[str, View]:
    """The views on rank 0. The terminal is the last: its summary stands below what the others have to say."""
    run, alerts = read_run(job.folder.path), open_alerts(job.config, note)
    trackers = open_trackers(job.config, job.folder.path, job.progress.step, note)
    terminal.follow(run, f"{job.config.model.name} on {job.config.data.source}")
    report = live_report(run, job.config.log.report_interval_s)
    views: dict[str, View] = {REPORT.usual: report, "alerts": alerts.add, "trackers": trackers.add}
    if (port := job.config.log.metrics_port) is not None:
        views["prometheus"] = Prometheus(run, job.config.run_name, port, note).add
    return views | {"terminal": terminal.add}


def start_fields(job: Job) -> dict[str, Any]:
    """The fields of a start's event: how to start the run again, and on what it runs."""
    cpu = f"CPU, {several(torch.get_num_threads(), 'thread')} per rank"
    device = torch.cuda.get_device_name(job.context.device) if job.context.device.type == "cuda" else cpu
    submitted = os.environ.get("MEGALITE_COMMAND")  # set by a batch script: what submits it again
    return {
        "command": submitted or launch_command(read_environment(os.environ), sys.argv),
        "overrides": [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")],
        "about": resolved(job, device),
        "versions": versions(),
        "device": device,
        "layout": asdict(job.context.layout),
        "hosts": job.hosts,
        "ranks_per_node": job.hosts.count(job.hosts[0]),
        "changes": job.folder.changes,
    }


def resolved(job: Job, device: str) -> list[list[str]]:
    """Label and text of everything that was resolved."""
    train, model, moe, done = job.config.train, job.config.model, job.config.model.moe, job.progress
    sizes, samples = batch_sizes(train), samples_after(train, train.steps, done=done.step, samples=done.samples)
    flops = flops_per_token(model, train.seq_length, causal=False) / 1e6
    parameters = f"{parameter_count(model):,} parameters"
    shape = f"{several(model.num_layers, 'layer')}, hidden size {model.hidden_size:,}, vocabulary {model.vocab_size:,}"
    if moe.num_experts:
        parameters += f", of which a token meets {active_parameters(model):,}"
        shape += f"; {moe.num_experts} experts in {several(len(model.expert_layers), 'layer')}, top {moe.top_k}"
    batch = f"{several(train.global_batch_size, 'sequence')} of {train.seq_length:,} tokens"
    grows = "" if train.batch_ramp is None else f", growing from {sizes.start} sequences by {sizes.step}"
    return [
        ["model", f"{model.name}: {parameters}, {flops:,.1f} MFLOP per token"],
        ["", shape],
        ["batch", f"{batch}, {train.micro_batch_size} in a microbatch{grows}"],
        ["data", job.data.description],
        ["length", length_words(job.config, job.data, samples)],
        *(["" if at else "phases", phase.words] for at, phase in enumerate(job.plan) if len(job.plan) > 1),
        *(["", f"evaluated on {name}: {several(its.tokens, 'token')}"] for name, its in job.data.sets.items()),
        *(["" if at else "layout", line] for at, line in enumerate(header_lines(job.context.layout))),
        ["device", f"{device}, {PRECISIONS[job.context.dtype]}"],
        *memory_lines(job),
        ["run folder", str(job.folder.path)],
        *([["branches", f"off {place}"]] if (place := job.base.checkpoint.branch_from) else []),
        *([] if job.resumed_from is None else [["continues", f"from the checkpoint of step {job.resumed_from}"]]),
    ]


def memory_lines(job: Job) -> Iterator[list[str]]:
    """What training takes of rank 0's GPU by the formula (plan/gpu_memory.py)."""
    if job.context.device.type == "cuda":
        memory = rank_memory(job.config, job.context.layout, job.context.rank)
        has, parts = torch.cuda.mem_get_info(job.context.device)[1], asdict(memory).items()
        words = ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in parts)
        yield ["memory", f"{memory.total / 2**30:,.1f} GiB of {has / 2**30:,.1f} needed on rank 0: {words}"]


def versions() -> dict[str, str]:
    """Versions by name of what computes; a package that is not installed is left out."""
    found = {"megalite": __version__, **commit(), "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    found["torch"] = torch.__version__  # with its build
    found |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return found | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def commit(checkout: Path = Path(__file__).parents[2]) -> dict[str, str]:
    """The git commit of the checkout that megalite runs from; nothing where it is installed, or git is not."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        if (checkout / ".git").exists():
            described = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=5, check=True)
            return {"commit": described.stdout.strip()}
    return {}
