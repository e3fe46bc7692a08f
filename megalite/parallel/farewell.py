"""Which rank ended the job, found out by those that are left.

A rank whose collective breaks sees a socket, not a rank, and its own end breaks the collectives of its neighbours. So
each leaves word at the place where all ranks met (meeting.py) and waits a moment. Who left an error of its own is the
cause. Among those who left no word is who was killed, is stopped or hangs, and perhaps some who still wait for us.
"""

import socket
import time

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from megalite.parallel.context import ParallelContext
from megalite.parallel.meeting import listed

WAIT_S = 3.0


def cause_of_the_end(context: ParallelContext, error: BaseException) -> str:
    """What the ranks know together about why they cannot go on, in a line for people; empty for a single process."""
    if context.meeting is None:
        return ""
    try:
        return _ask(context.meeting, context, error)
    except DistError:
        return "rank 0 has ended, and with it the place where the ranks met"


def is_broken_link(error: BaseException) -> bool:
    """Whether another rank's failure may be behind this error (gloo has no exception type of its own)."""
    return isinstance(error, DistError) or "third_party/gloo" in str(error)


def _ask(store: Store, context: ParallelContext, error: BaseException) -> str:
    if not is_broken_link(error):
        word = f"rank {context.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
        store.compare_set("farewell/verdict", "", word)
    store.set(f"farewell/{context.rank}", "")
    left = store.add("farewell/count", 1)
    deadline = time.monotonic() + WAIT_S
    while not store.check(["farewell/verdict"]) and left < context.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        left = store.add("farewell/count", 0)
    if not store.check(["farewell/verdict"]):
        silent = [rank for rank in range(context.world_size) if not store.check([f"farewell/{rank}"])]
        word = "every rank lost its connection to another one (the network?)"
        if silent:
            who = f"rank {listed(silent)}: it" if len(silent) == 1 else f"ranks {listed(silent)}: one of them"
            word = f"no word from {who} was killed, is stopped, or hangs"
        store.compare_set("farewell/verdict", "", word)
    verdict = store.get("farewell/verdict").decode()
    store.add("farewell/readers", 1)
    deadline = time.monotonic() + 1
    while context.rank == 0 and time.monotonic() < deadline:  # the store may live in this process
        if store.add("farewell/readers", 0) >= store.add("farewell/count", 0):
            break
        time.sleep(0.05)
    return verdict
