"""Finds out, together with the other ranks, which rank ended the job.

A rank whose collective breaks sees a socket, not a rank, and its own end breaks the collectives of its neighbours. So
each rank leaves word in the store of the rendezvous and waits a moment. A rank that left an error of its own is the
cause. A rank that left no word was killed, is stopped or hangs, or still waits for us.
"""

import socket
import time

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from megalite.launch.context import ParallelContext
from megalite.launch.rendezvous import listed

WAIT_S = 3.0


def find_cause(context: ParallelContext, error: BaseException) -> str:
    """What the ranks know together about why they cannot go on, in a line for people; empty for a single process."""
    if context.store is None:
        return ""
    try:
        return _ask(context.store, context, error)
    except DistError:
        return "rank 0 has ended, and with it the place where the ranks met"


def is_broken_link(error: BaseException) -> bool:
    """Whether another rank's failure may be behind this error (gloo has no exception type of its own)."""
    return isinstance(error, DistError) or "third_party/gloo" in str(error)


def _ask(store: Store, context: ParallelContext, error: BaseException) -> str:
    if not is_broken_link(error):
        word = f"rank {context.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
        store.compare_set("failure/verdict", "", word)
    store.set(f"failure/{context.rank}", "")
    left = store.add("failure/count", 1)
    deadline = time.monotonic() + WAIT_S
    while not store.check(["failure/verdict"]) and left < context.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        left = store.add("failure/count", 0)
    if not store.check(["failure/verdict"]):
        silent = [rank for rank in range(context.world_size) if not store.check([f"failure/{rank}"])]
        word = "every rank lost its connection to another one (the network?)"
        if silent:
            who = f"rank {listed(silent)}: it" if len(silent) == 1 else f"ranks {listed(silent)}: one of them"
            word = f"no word from {who} was killed, is stopped, or hangs"
        store.compare_set("failure/verdict", "", word)
    verdict = store.get("failure/verdict").decode()
    store.add("failure/readers", 1)
    deadline = time.monotonic() + 1
    while context.rank == 0 and time.monotonic() < deadline:  # the store may live in this process
        if store.add("failure/readers", 0) >= store.add("failure/count", 0):
            break
        time.sleep(0.05)
    return verdict
