"""Raises the number of files that this process may have open, connections to other ranks included.

Gloo connects each rank of a group with every other one, so a world of a thousand ranks reaches the 1,024 that a shell
usually allows. A process may raise that limit up to the hard one, which the administrator sets.
"""

import resource
from collections.abc import Iterable

from megalite.errors.problems import Problem, UserError
from megalite.layout.groups import GroupSpec

BESIDES = 128  # the interpreter's own, pipes, logs, token files, a checkpoint that is being written
OF_A_GROUP = 4  # what gloo opens for a group besides its connections: 4, seen for groups of 2 to 6 ranks


def files_of(specs: Iterable[GroupSpec], world_size: int, *, on_gpu: bool) -> int:
    """An upper bound of the files that a rank of these groups has open at a time."""
    formed = [spec for spec in specs if len(spec.ranks) > 1 and spec.communicates]
    by_gloo = {(spec.traffic, spec.ranks) for spec in formed if spec.on_host or not on_gpu}
    sizes = [world_size, *(len(ranks) for _, ranks in by_gloo)]  # the first: the control group
    store = world_size  # rank 0 serves the store of the rendezvous
    return BESIDES + store + sum(size - 1 + OF_A_GROUP for size in sizes)


def allow_open_files(needed: int) -> None:
    """Raise this process's limit to `needed` if it is lower; UserError where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        rule = f"the connections between so many ranks need up to {needed:,} open files in one process"
        remedy = f"ulimit -Hn {needed} or more (limits.conf, slurmd's LimitNOFILE, docker run --ulimit nofile={needed})"
        raise UserError(Problem("ulimit -Hn", hard, rule, remedy))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def allow_more_open_files(count: int) -> None:
    """Raise this process's limit by `count`, as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        more = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
