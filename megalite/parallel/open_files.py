"""How many files a process may have open, connections to other ranks included.

Gloo connects each rank of a group with every other one, so a world of a thousand ranks reaches the 1,024 that a shell
usually allows. Whoever starts a process may raise that limit up to the hard one, which is the administrator's.
"""

import resource
from collections.abc import Iterable

from megalite.config.problems import Problem, UserError
from megalite.parallel.groups import GroupSpec

BESIDES = 128  # the interpreter's own, pipes, logs, token files, a checkpoint that is being written
OF_A_GROUP = 4  # what gloo opens for a group besides its connections: 4, seen for groups of 2 to 6 ranks


def files_of(specs: Iterable[GroupSpec], world_size: int, *, on_gpu: bool) -> int:
    """An upper bound of the files that a rank of these groups has open at a time."""
    by_gloo = {(spec.traffic, spec.ranks) for spec in specs if len(spec.ranks) > 1 and (spec.on_host or not on_gpu)}
    by_gloo.add(("control", tuple(range(world_size))))
    meeting = world_size  # rank 0 serves the place where all meet
    return BESIDES + meeting + sum(len(ranks) - 1 + OF_A_GROUP for _, ranks in by_gloo)


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
