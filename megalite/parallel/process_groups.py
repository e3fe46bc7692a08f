"""Groups of ranks become communicators of torch.distributed.

All ranks walk the same list of all groups in the same order (groups.py) and name each to torch, members or not: torch
then counts alike on every rank and gives each group a name of its own. `new_group(use_local_synchronization=True)`
would spare a rank the groups of others, 0.2 s among 16,384 ranks, but derives a group's name from how many groups this
rank has at the moment: groups that not all ranks have, and groups made anew after others were closed, then wait for
members under different names or under a used one, for ever. Groups of one rank are never made.

NCCL's communicators are formed here, not by the first collective: a group that is given `device_id` calls ncclCommInit*
at once (torch's words on init_process_group), so a network or a driver that is not up to it fails under the time-out of
the start and not in the middle of a step. And an eager group sends and receives over its own communicator, in the order
of all else on it, where a lazy one forms another communicator for each pair of ranks (torch's ProcessGroupNCCL): that
is why each direction of the pipeline has a group of its own. What the forming costs was not measured.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megalite.parallel.groups import GroupSpec
from megalite.parallel.nccl_options import NcclOptions


def make_groups(
    specs: Iterable[GroupSpec],
    rank: int,
    control: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    nccl: Mapping[str, NcclOptions],
) -> dict[str, dist.ProcessGroup]:
    """The communicators of the groups that `rank` belongs to, by name. Every rank of the world must call it.

    `control` is a group of the whole world for host-side traffic. `nccl` holds options by `GroupSpec.options`; groups
    with different options do not share a communicator.
    """
    world = tuple(range(dist.get_world_size()))
    made: dict[tuple[str, tuple[int, ...], NcclOptions | None], Any] = {("control", world, None): control}
    groups = {}
    for spec in specs:
        on_gpu = device.type == "cuda" and not spec.on_host
        options = nccl.get(spec.options) if on_gpu else None
        key = (spec.traffic, spec.ranks, options)
        if key not in made:
            made[key] = dist.new_group(
                list(spec.ranks),
                timeout=timeout,
                backend="nccl" if on_gpu else host_backend(),
                pg_options=_torch_options(options, timeout),
                group_desc=spec.name,
                device_id=device if on_gpu else None,
            )
        if rank in spec.ranks:
            groups[spec.name] = made[key]
    return groups


def _torch_options(options: NcclOptions | None, timeout: timedelta) -> Any:
    if options is None:
        return None
    wanted = options.as_torch()
    wanted._timeout = timeout  # torch warns where it differs from new_group's
    return wanted


def host_backend() -> str:
    """gloo, or torch's fake backend where the world itself is fake: one process that plays one of many ranks."""
    return "fake" if dist.get_backend() == "fake" else "gloo"
