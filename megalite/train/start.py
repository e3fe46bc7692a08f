"""From a config to a ParallelContext: what the settings mean to `launch`, which knows no config."""

from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from megalite.config.nccl_options import read_nccl_options
from megalite.config.optimizer_rules import precision_problems
from megalite.config.remedies import parallel_layout
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, yaml_value
from megalite.errors.problems import Problem, collect
from megalite.launch import startup
from megalite.launch.context import CPU, ParallelContext
from megalite.launch.device import choose_device, choose_precision, name_of
from megalite.launch.environment import ProcessEnvironment
from megalite.layout.groups import GroupNeeds

# What a machine may have its own of: cores, and places whose content is compared by those who read it.
OF_A_MACHINE = (
    *("tokenizer", "data.path", "data.cache_dir", "data.workers", "checkpoint.init_from"),
    "parallel.nccl_options",  # its content is compared
    "run_name",  # rank 0 alone shows it, and run_dir says where the run is kept
)


def start(config: Config, environment: ProcessEnvironment, store: Store | None = None) -> ParallelContext:
    """This rank's context, as `launch.startup.start` makes it. All ranks must call it; all refuse alike."""
    problems: list[Problem] = []
    axes = config.parallel
    device = collect(lambda: choose_device(config.device, environment), problems) or CPU
    dtype = collect(lambda: choose_precision(config.precision, device), problems) or torch.float32
    if config.precision == "auto":  # else rules.py has judged it
        problems += precision_problems(config, name_of(dtype))
    nccl = collect(lambda: read_nccl_options(Path(axes.nccl_options)) if axes.nccl_options else {}, problems)
    plan = {"parallel.nccl_options": str(nccl)} if nccl else {}
    plan |= {
        name: yaml_value(value_of(config, name))
        for name, setting in SETTINGS.items()
        if name not in OF_A_MACHINE and value_of(config, name) != setting.default
    }
    return startup.start(
        environment,
        collect(lambda: parallel_layout(config, environment.world_size), problems),
        device,
        dtype,
        problems=problems,
        plan=plan | {"device": device.type, "precision": name_of(dtype)},
        timeout_s=axes.startup_timeout_s,
        needs=needs_of(config),
        nccl=nccl,
        store=store,
    )


def needs_of(config: Config) -> GroupNeeds:
    """What the config asks of the process groups."""
    return GroupNeeds(
        tied_embeddings=config.model.tie_embeddings,
        kv_heads=config.model.num_key_value_heads,
        optimizer_instances=config.optimizer.instances if config.optimizer.zero else 1,
        background_saving=config.checkpoint.asynchronous,
    )
