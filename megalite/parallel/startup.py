"""From environment variables to a ParallelContext.

A mistake in one rank's environment or device stops all ranks alike, before a process group exists (meeting.py). A
single process has no process group at all.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megalite.config.problems import Problem, UserError
from megalite.config.schema import Config
from megalite.parallel.context import CPU, ParallelContext
from megalite.parallel.device import choose_device, choose_precision, set_threads
from megalite.parallel.environment import ProcessEnvironment
from megalite.parallel.layout import ParallelLayout
from megalite.parallel.meeting import meet


def start(config: Config, environment: ProcessEnvironment) -> ParallelContext:
    """This rank's context. Where the process already belongs to a world (a second call), its groups are made anew."""
    problems: list[Problem] = []
    device, dtype = CPU, torch.float32
    try:
        device = choose_device(config.device, environment)
        dtype = choose_precision(config.precision, device)
    except UserError as error:
        problems = error.problems
    set_threads(environment)
    axes = config.parallel
    layout = ParallelLayout.over(environment.world_size, tp=axes.tp, cp=axes.cp, pp=axes.pp, order=axes.order)
    store = None
    if environment.world_size > 1 and not dist.is_initialized():
        store = meet(environment, device, problems, timeout_s=axes.timeout_s)
    elif problems:
        raise UserError(problems)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return join(layout, environment.rank, device, dtype, store, timeout_s=axes.timeout_s)


def join(
    layout: ParallelLayout,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    store: Store | None,
    *,
    timeout_s: float,
) -> ParallelContext:
    """Make the groups of the layout. `store` is where the ranks have met; None: one process, or already initialised.

    The default group of torch.distributed is the control group, gloo everywhere; each axis larger than 1 gets groups of
    its own over the device's backend.
    """
    if layout.world_size == 1:
        return ParallelContext(layout, rank, device, dtype)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        assert store is not None
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    assert dist.get_world_size() == layout.world_size, "this process already belongs to a world of another size"
    dp_group = axis_group(layout, "dp", rank, device, timeout)
    control = dist.group.WORLD
    return ParallelContext(layout, rank, device, dtype, dp_group, control, store)


def axis_group(
    layout: ParallelLayout, axis: str, rank: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup | None:
    """The group of `rank` along one axis, None where the axis has size 1. All ranks must call it."""
    mine = None
    for ranks in layout.groups(axis):
        if len(ranks) == 1:
            continue
        group = dist.new_group(
            ranks,
            timeout=timeout,
            backend="nccl" if device.type == "cuda" else "gloo",
            group_desc=axis,
            device_id=device if device.type == "cuda" else None,
        )
        if rank in ranks:
            mine = group
    return mine
