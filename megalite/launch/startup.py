"""Starts a rank: it meets the others (rendezvous.py), then all make their process groups (process_groups.py).

A mistake in one rank's environment, device or settings stops all ranks alike, before a process group is made. A single
process has no process group at all.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megalite.errors.problems import Problem, UserError, collect
from megalite.launch.context import ParallelContext
from megalite.launch.device import set_threads
from megalite.launch.environment import ProcessEnvironment
from megalite.launch.host_memory import keep_freed_memory
from megalite.launch.open_files import allow_open_files, files_of
from megalite.launch.process_groups import NcclOptions, host_backend, make_groups
from megalite.launch.rendezvous import RankInfo, rendezvous, rendezvous_in_world
from megalite.layout.groups import GroupNeeds, all_groups, groups_of
from megalite.layout.ranks import ParallelLayout

CODE = Path(__file__).parents[1]  # all of megalite


def start(
    environment: ProcessEnvironment,
    layout: ParallelLayout | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    problems: Sequence[Problem] = (),
    plan: Mapping[str, str] | None = None,
    timeout_s: float,
    needs: GroupNeeds | None = None,
    nccl: Mapping[str, NcclOptions] | None = None,
) -> ParallelContext:
    """This rank's context. Where the process already belongs to a world (of the same size), its groups are made there.

    All ranks must call it. Raises one UserError, alike on all ranks, that holds the problems of all. `layout` is None
    where a problem says why. `plan` is what must be equal on all ranks, besides their code: values by name. Until
    `set_timeout` is called, a rank may take `timeout_s` to join the others.
    """
    found = list(problems)
    set_threads(environment)
    if device.type == "cpu":
        keep_freed_memory(os.environ)
    collect(lambda: _refuse_other_world(environment.rank, environment.world_size), found)
    store = None
    if dist.is_initialized() or environment.world_size > 1:
        if layout is not None:
            collect(partial(_allow_connections, layout, environment.rank, needs or GroupNeeds(), device), found)
        shared = {} if found else {**(plan or {}), "torch": torch.__version__, "megalite": _code()}
        info = RankInfo.of(environment.rank, device, shared, found)
        if dist.is_initialized():
            rendezvous_in_world(environment, info, timeout_s=timeout_s)
        else:
            store = rendezvous(environment, info, timeout_s=timeout_s)
    elif found:
        raise UserError(found)
    assert layout is not None, "a rank with problems has been refused"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch would warn that messages of a group go in one order; the pipeline counts on it (process_groups.py).
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    return join(layout, environment.rank, device, dtype, store, timeout_s=timeout_s, needs=needs, nccl=nccl)


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
    groups = make_groups(all_groups(layout, needs), rank, device, timeout, nccl or {})
    return ParallelContext(layout, rank, device, dtype, specs, groups, control, store)


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


def _code() -> str:
    """A fingerprint of the code: ranks with different code are refused."""
    content = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        content.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"code with fingerprint {content.hexdigest()[:12]}"
