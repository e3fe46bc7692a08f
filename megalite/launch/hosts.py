"""Warns where tensor-parallel groups, for which every layer waits, reach beyond one machine."""

import socket
from collections import Counter
from collections.abc import Sequence

from megalite.launch.context import ParallelContext
from megalite.launch.rendezvous import listed


def slow_tensor_parallelism(context: ParallelContext) -> str | None:
    """A warning where tensor-parallel groups cross machines, else None. Every rank must call it."""
    if context.size("tp") == 1:
        return None
    hosts = [host for (host,) in context.gather_json([socket.gethostname()])]
    return crossing(context.layout.groups("tp"), hosts)


def crossing(groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> str | None:
    """What to say about tensor-parallel `groups` of ranks, of which rank r runs on hosts[r]."""
    across = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    if not across:
        return None
    first, per_host = across[0], min(Counter(hosts).values())
    places = " and ".join(sorted({hosts[rank] for rank in first}))
    return (
        f"warning: {len(across)} of {len(groups)} tensor-parallel groups cross machines (ranks {listed(list(first))} "
        f"on {places}): each layer waits for the network between them, several times slower than links inside a "
        f"machine. Keep parallel.tp at {per_host} or less, a divisor of the ranks of a machine, and tp first in "
        "parallel.order."
    )
