"""Finds out, together with the other ranks, which rank ended the job.

A rank whose collective breaks sees a socket, not a rank, and its own end breaks the collectives of its neighbours. So
each rank leaves word in the store of the rendezvous and waits a moment. A rank that left an error of its own is the
cause. A rank that left no word was killed, is stopped or hangs.
"""

import socket
import time

from torch.distributed import DistError

from megalite.launch.context import ParallelContext
from megalite.launch.rendezvous import listed, wait_until

WAIT_S = 3.0


def find_cause(context: ParallelContext, error: BaseException) -> str:
    """What the ranks know together about why they cannot go on, in a line for people; empty for a single process."""
    store, size = context.store, context.world_size
    if store is None:
        return ""

    def settled() -> bool:  # asked by every rank: not a look at every rank's word
        return store.check(["failure/cause"]) or store.add("failure/count", 0) == size

    try:
        if not is_broken_link(error):
            word = f"rank {context.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
            store.compare_set("failure/cause", "", word)
        store.set(f"failure/{context.rank}", "")
        store.add("failure/count", 1)
        wait_until(settled, time.monotonic() + WAIT_S)
        if not store.check(["failure/cause"]):
            silent = [rank for rank in range(size) if not store.check([f"failure/{rank}"])]
            word = f"no word from rank {listed(silent)}: killed, stopped or hanging"
            store.compare_set("failure/cause", "", word if silent else "a lost connection (the network?)")
        cause = store.get("failure/cause").decode()
        if context.rank == 0:
            time.sleep(1)  # the store may live in this process: the others read, too
    except DistError:
        return "rank 0 has ended, and with it the place where the ranks met"
    return cause


def is_broken_link(error: BaseException) -> bool:
    """Whether another rank's failure may be behind this error (gloo has no exception type of its own)."""
    return isinstance(error, DistError) or "third_party/gloo" in str(error)
