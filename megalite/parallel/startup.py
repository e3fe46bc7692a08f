"""From environment variables to a ParallelContext.

A mistake in one rank's environment, device or settings stops all ranks alike, before a process group is made
(meeting.py). A single process has no process group at all.
"""

import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megalite.config.optimizer_rules import precision_problems
from megalite.config.parallel_rules import layout_request, parallel_setting
from megalite.config.problems import Problem, UserError, collect
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, yaml_value
from megalite.parallel.context import CPU, ParallelContext
from megalite.parallel.device import choose_device, choose_precision, name_of, set_threads
from megalite.parallel.environment import ProcessEnvironment
from megalite.parallel.groups import GroupNeeds, all_groups, groups_of
from megalite.parallel.host_memory import keep_freed_memory
from megalite.parallel.layout import ParallelLayout
from megalite.parallel.layout_rules import layout_of
from megalite.parallel.meeting import Card, meet, meet_in_world
from megalite.parallel.nccl_options import NcclOptions, read_nccl_options
from megalite.parallel.open_files import allow_open_files, files_of
from megalite.parallel.process_groups import host_backend, make_groups

CODE = Path(__file__).parents[1]  # all of megalite
# What a machine may have its own of: cores, and places whose content is compared by those who read it.
OF_A_MACHINE = (
    *("tokenizer", "data.path", "data.cache_dir", "data.workers"),
    *("checkpoint.init_from", "parallel.nccl_options"),
)


def start(config: Config, environment: ProcessEnvironment) -> ParallelContext:
    """This rank's context. Where the process already belongs to a world (of the same size), its groups are made there.

    All ranks must call it. Raises one UserError, alike on all ranks, that holds the problems of all.
    Until `set_timeout` is called, a rank may take parallel.startup_timeout_s to join the others.
    """
    problems: list[Problem] = []
    axes = config.parallel
    device = collect(lambda: choose_device(config.device, environment), problems) or CPU
    dtype = collect(lambda: choose_precision(config.precision, device), problems) or torch.float32
    if config.precision == "auto":  # else rules.py has judged it
        problems += precision_problems(config, name_of(dtype))
    nccl = collect(lambda: read_nccl_options(Path(axes.nccl_options)) if axes.nccl_options else {}, problems) or {}
    set_threads(environment)
    if device.type == "cpu":
        keep_freed_memory(os.environ)
    layout = collect(lambda: layout_of(layout_request(config, environment.world_size), parallel_setting), problems)
    needs = needs_of(config)
    collect(lambda: _refuse_other_world(environment.rank, environment.world_size), problems)
    store = None
    if dist.is_initialized() or environment.world_size > 1:
        if layout is not None:
            collect(partial(_allow_connections, layout, environment.rank, needs, device), problems)
        plan = {} if problems else _plan(config, device, dtype, nccl)
        card = Card.written(environment.rank, device, plan, problems)
        if dist.is_initialized():
            meet_in_world(environment, card, timeout_s=axes.startup_timeout_s)
        else:
            store = meet(environment, card, timeout_s=axes.startup_timeout_s)
    elif problems:
        raise UserError(problems)
    assert layout is not None, "whoever meets with problems is refused"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch would warn that messages of a group go in one order; the pipeline counts on it (process_groups.py).
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    return join(
        layout, environment.rank, device, dtype, store, timeout_s=axes.startup_timeout_s, needs=needs, nccl=nccl
    )


def join(
    layout: ParallelLayout,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    store: Store | None,
    *,
    timeout_s: float,
    needs: GroupNeeds | None = None,
    nccl: Mapping[str, NcclOptions] | None = None,
) -> ParallelContext:
    """Make the groups of the layout. `store` is where the ranks have met; None: one process, or already initialised.

    The control group is the world that is made here, or a gloo group beside one that was there before, whose time-outs
    and end are its maker's. With torch's fake backend as the default group, one process becomes any rank of any layout.
    Raises a UserError, on this rank alone, where the world is another one; `start` has settled that with all ranks.
    """
    needs = needs or GroupNeeds()
    specs = groups_of(layout, rank, needs)
    _refuse_other_world(rank, layout.world_size)
    if layout.world_size == 1:
        return ParallelContext(layout, rank, device, dtype, specs)
    timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        store = None
        control = dist.new_group(timeout=timeout, backend=host_backend(), group_desc="control")
    else:
        assert store is not None
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
        control = dist.group.WORLD
    assert control is not None
    groups = make_groups(all_groups(layout, needs), rank, control, device, timeout, nccl or {})
    return ParallelContext(layout, rank, device, dtype, specs, groups, control, store)


def needs_of(config: Config) -> GroupNeeds:
    """What the config asks of the groups."""
    return GroupNeeds(
        tied_embeddings=config.model.tie_embeddings,
        kv_heads=config.model.num_key_value_heads,
        optimizer_instances=config.optimizer.instances if config.optimizer.zero else 1,
        background_saving=config.checkpoint.asynchronous,
    )


def _allow_connections(layout: ParallelLayout, rank: int, needs: GroupNeeds, device: torch.device) -> None:
    specs = groups_of(layout, rank, needs).values()
    allow_open_files(files_of(specs, layout.world_size, on_gpu=device.type == "cuda"))


def _refuse_other_world(rank: int, world_size: int) -> None:
    """A process that belongs to a world already cannot be another rank, or one of another number."""
    if not dist.is_initialized():
        return
    remedy = "leave it first (torch.distributed.destroy_process_group), or start with its rank and size"
    if dist.get_world_size() != world_size:
        rule = f"this process belongs to a process group of {dist.get_world_size()} already"
        raise UserError(Problem("WORLD_SIZE", world_size, rule, remedy))
    if dist.get_rank() != rank:
        rule = f"this process is rank {dist.get_rank()} of a process group already"
        raise UserError(Problem("RANK", rank, rule, remedy))


def _plan(config: Config, device: torch.device, dtype: torch.dtype, nccl: Mapping[str, NcclOptions]) -> dict[str, str]:
    """What must be equal on all ranks, or they would make other groups or train another model: settings that are not at
    their defaults, what device and precision became, and the code that acts on them."""
    settings = {
        name: yaml_value(value_of(config, name))
        for name, setting in SETTINGS.items()
        if name not in OF_A_MACHINE and value_of(config, name) != setting.default
    }
    options = hashlib.sha256(repr(sorted(nccl.items(), key=lambda item: item[0])).encode()).hexdigest()[:12]
    return settings | {
        "device": device.type,
        "precision": name_of(dtype),
        "parallel.nccl_options": f"options with fingerprint {options}" if nccl else "no options",
        "torch": torch.__version__,
        "megalite": f"code with fingerprint {_fingerprint_of_the_code()}",
    }


def _fingerprint_of_the_code() -> str:
    content = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        content.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:12]
