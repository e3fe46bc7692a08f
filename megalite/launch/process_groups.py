"""Makes communicators of torch.distributed from groups of ranks.

All ranks walk the same list of all groups in the same order (groups.py) and name each to torch, members or not: torch
then counts alike on every rank and gives each group a name of its own. `new_group(use_local_synchronization=True)`
would spare a rank the groups of others, 0.2 s among 16,384 ranks. But it derives a group's name from how many groups
this rank has at the moment. Groups that not all ranks have, and groups made anew after others were closed, then wait
for ever, under different names or under a used one. Groups of one rank, and those over which nothing travels,
are never made.

NCCL's communicators are formed here, not by the first collective: `new_group` with `device_id` calls ncclCommInit* at
once. So a network or a driver that fails does so under the time-out of the start, not in the middle of a step. Such a
group sends and receives over its own communicator, in the order of all else on it; a lazy one forms another for each
pair of ranks. That is why each direction of the pipeline has a group of its own.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megalite.layout.groups import GroupSpec

NcclOptions = Mapping[str, Any]  # attributes of torch's ProcessGroupNCCL.Options, or of its `config`


def make_groups(
    specs: Iterable[GroupSpec],
    rank: int,
    device: torch.device,
    timeout: timedelta,
    nccl: Mapping[str, NcclOptions],
) -> dict[str, dist.ProcessGroup]:
    """The communicators of the groups that `rank` belongs to, by name. Every rank of the world must call it.

    `nccl` holds options by `GroupSpec.options`; groups with different options do not share a communicator.
    """
    made: dict[tuple[Any, ...], Any] = {}
    groups = {}
    for spec in (spec for spec in specs if spec.communicates):
        on_gpu = device.type == "cuda" and not spec.on_host
        options = nccl.get(spec.options, {}) if on_gpu else {}
        key = (spec.traffic, spec.ranks, tuple(sorted(options.items())))
        if key not in made:
            made[key] = dist.new_group(
                list(spec.ranks),
                timeout=timeout,
                backend="nccl" if on_gpu else host_backend(),
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


def host_backend() -> str:
    """gloo, or torch's fake backend where the world itself is fake: one process that plays one of many ranks."""
    return "fake" if dist.get_backend() == "fake" else "gloo"
