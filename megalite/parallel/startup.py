"""From environment variables to a ParallelContext.

A mistake in one rank's environment or device stops all ranks alike, before a process group exists (meeting.py). A
single process has no process group at all.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megalite.config.problems import Problem, UserError, collect
from megalite.config.rules import layout_request, parallel_setting
from megalite.config.schema import Config
from megalite.parallel.context import CPU, ParallelContext
from megalite.parallel.device import choose_device, choose_precision, set_threads
from megalite.parallel.environment import ProcessEnvironment
from megalite.parallel.groups import GroupNeeds, all_groups, groups_of
from megalite.parallel.layout import ParallelLayout
from megalite.parallel.layout_rules import layout_of
from megalite.parallel.meeting import meet
from megalite.parallel.nccl_options import NcclOptions, read_nccl_options
from megalite.parallel.process_groups import host_backend, make_groups


def start(config: Config, environment: ProcessEnvironment) -> ParallelContext:
    """This rank's context. Where the process already belongs to a world (of the same size), its groups are made there.

    Until `set_timeout` is called, a rank may take parallel.startup_timeout_s to join the others.
    """
    problems: list[Problem] = []
    axes = config.parallel
    device = collect(lambda: choose_device(config.device, environment), problems) or CPU
    dtype = collect(lambda: choose_precision(config.precision, device), problems) or torch.float32
    nccl = collect(lambda: read_nccl_options(Path(axes.nccl_options)) if axes.nccl_options else {}, problems) or {}
    set_threads(environment)
    layout = layout_of(layout_request(config, environment.world_size), parallel_setting)
    store = None
    if environment.world_size > 1 and not dist.is_initialized():
        store = meet(environment, device, problems, timeout_s=axes.startup_timeout_s)
    elif problems:
        raise UserError(problems)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    needs = GroupNeeds(tied_embeddings=config.model.tie_embeddings, kv_heads=config.model.num_key_value_heads)
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

    The default group of torch.distributed is the control group, gloo unless somebody else made it. With torch's fake
    backend as the default group, one process becomes any rank of any layout.
    """
    needs = needs or GroupNeeds()
    specs = groups_of(layout, rank, needs)
    if layout.world_size == 1:
        return ParallelContext(layout, rank, device, dtype, specs)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        assert store is not None
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    if (dist.get_rank(), dist.get_world_size()) != (rank, layout.world_size):
        rule = f"this process is rank {dist.get_rank()} of a process group of {dist.get_world_size()} already"
        remedy = "leave it first (torch.distributed.destroy_process_group), or start with its sizes"
        raise UserError(Problem("rank, world size", f"{rank}, {layout.world_size}", rule, remedy))
    control = dist.group.WORLD
    if dist.get_backend() != host_backend():
        control = dist.new_group(timeout=timeout, backend=host_backend(), group_desc="control")
    assert control is not None
    groups = make_groups(all_groups(layout, needs), rank, control, device, timeout, nccl or {})
    return ParallelContext(layout, rank, device, dtype, specs, groups, control, store)
