"""Starts a rank: it meets the others (rendezvous.py), then all make their process groups.

A mistake in one rank's environment, device or settings stops all ranks alike, before a process group is made. A single
process has no process group at all.

All ranks walk the same list of all groups in the same order (layout/groups.py) and name each to torch, members or not:
torch then counts alike on every rank and gives each group a name of its own. Groups of one rank are never made.

NCCL's communicators are formed here, not by the first collective: `new_group` with `device_id` calls ncclCommInit* at
once. So a network or a driver that fails does so under the time-out of the start, not in the middle of a step. Such a
group sends and receives over its own communicator, in the order of all else on it; a lazy one forms another for each
pair of ranks. That is why each direction of the pipeline has a group of its own.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megalite.errors.problems import Problem, refuse
from megalite.launch.context import ParallelContext
from megalite.launch.device import set_threads
from megalite.launch.environment import ProcessEnvironment
from megalite.launch.host import allow_open_files, keep_freed_memory, listen_on_loopback
from megalite.launch.rendezvous import RankInfo, rendezvous
from megalite.launch.watchdog import after_report_s
from megalite.layout.groups import GroupNeeds, GroupSpec, all_groups, groups_of
from megalite.layout.ranks import ParallelLayout

CODE = Path(__file__).parents[1]  # all of megalite

NcclOptions = Mapping[str, Any]  # attributes of torch's ProcessGroupNCCL.Options, or of its `config`


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
    store: Store | None = None,
) -> ParallelContext:
    """This rank's context. All ranks must call it.

    Raises one UserError, alike on all ranks, that holds the problems of all. `layout` is None where a problem says why.
    `plan` is what must be equal on all ranks, besides their code: values by name. The ranks meet at `store`, by default
    at MASTER_ADDR:MASTER_PORT. Until `set_timeout` is called, a rank may take `timeout_s` to join the others.
    """
    set_threads(environment)
    if device.type == "cpu":
        keep_freed_memory(os.environ)
    if environment.world_size > 1:
        allow_open_files()
        own = {"WORLD_SIZE": str(environment.world_size), "torch": torch.__version__, "megalite": code_fingerprint()}
        info = RankInfo.of(environment.rank, device, {} if problems else own | dict(plan or {}), problems)
        store = rendezvous(environment, info, timeout_s=timeout_s, store=store)
        if environment.local_world_size == environment.world_size:
            listen_on_loopback(os.environ)
    refuse(problems)
    assert layout is not None, "a rank with problems has been refused"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch would warn that messages of a group go in one order; the pipeline counts on it.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    place = (layout, environment.rank, device, dtype, store)
    return join(*place, timeout_s=after_report_s(timeout_s), needs=needs, nccl=nccl)


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
    """Make the world, whose ranks meet at `store`, and the groups of the layout.

    Where torch's fake backend is the world already, one process becomes any rank of any layout.
    """
    needs = needs or GroupNeeds()
    specs, timeout = groups_of(layout, rank, needs), timedelta(seconds=timeout_s)
    if layout.world_size == 1:
        return ParallelContext(layout, rank, device, dtype, specs)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    groups = make_groups(all_groups(layout, needs), rank, device, timeout, nccl or {})
    return ParallelContext(layout, rank, device, dtype, specs, groups, dist.group.WORLD, store)


def make_groups(
    specs: Iterable[GroupSpec], rank: int, device: torch.device, timeout: timedelta, nccl: Mapping[str, NcclOptions]
) -> dict[str, dist.ProcessGroup]:
    """The communicators of the groups that `rank` belongs to, by name. Every rank of the world must call it.

    `nccl` holds options by `GroupSpec.options`; groups with different options do not share a communicator.
    """
    made: dict[tuple[Any, ...], Any] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for spec in specs:
        on_gpu = device.type == "cuda" and not spec.on_host
        options = nccl.get(spec.options, {}) if on_gpu else {}
        key = (spec.traffic, spec.ranks, tuple(sorted(options.items())))
        if key not in made:
            made[key] = dist.new_group(
                list(spec.ranks),
                timeout=timeout,
                backend="nccl" if on_gpu else dist.get_backend(),
                pg_options=_torch_options(options, timeout) if options else None,
                group_desc=spec.name,
                device_id=device if on_gpu else None,
            )
        if rank in spec.ranks:
            groups[spec.name] = made[key]
    return groups


def _torch_options(options: NcclOptions, timeout: timedelta) -> Any:
    """A new object for each group: `new_group` writes the group's name and members into it.

    NCCL's environment variables (`NCCL_MAX_CTAS`, `NCCL_NET`, ...) win over it.
    """
    wanted = dist.ProcessGroupNCCL.Options()
    wanted._timeout = timeout  # torch warns where it differs from new_group's
    for key, value in options.items():
        setattr(wanted if key == "is_high_priority_stream" else wanted.config, key, value)
    return wanted


def code_fingerprint() -> str:
    """A fingerprint of the code: ranks with different code are refused."""
    content = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        content.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"code with fingerprint {content.hexdigest()[:12]}"
