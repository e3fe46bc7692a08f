"""Times what a device does, and what a link between ranks carries; what hangs is an error in time.

A group of ranks is made by its members alone, at a store, outside of torch's world: neither needs a world that works.
"""

import queue
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

LINK_S = 30.0  # for one link, all of its all-reduces and their group
REPEATS = 20
THREAD = "preflight"

Result = TypeVar("Result")


def link_speed(store: Store, rank: int, size: int, device: torch.device) -> float:
    """GB/s of an all-reduce among `size` ranks that meet at `store`. Raises within LINK_S where it cannot be had."""
    return in_time(lambda: _all_reduce(store, rank, size, device), LINK_S)


def in_time(action: Callable[[], Result], limit_s: float) -> Result:
    """What the action gives; TimeoutError after `limit_s`. What hangs (NCCL, a driver, a disk) stays in its thread."""
    answers: queue.SimpleQueue[tuple[Result] | Exception] = queue.SimpleQueue()

    def act() -> None:
        try:
            answers.put((action(),))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=act, daemon=True, name=THREAD).start()
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer[0]


def hangs() -> bool:
    """Whether an action has not come back. It may wake up in C++ while Python ends, and abort the process."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def seconds(action: Callable[[], Any], device: torch.device, *, repeats: int = 1, at_least_s: float = 0.0) -> float:
    """The median of so many repetitions, for at least so long, after one that warms up if there are several.

    A device that throttles is fast at first: the best, or a few milliseconds, would hide it.
    """
    took: list[float] = []
    while len(took) < repeats or sum(took) < at_least_s:
        _wait_for(device)
        begun = time.perf_counter()
        action()
        _wait_for(device)
        took.append(time.perf_counter() - begun)
    return statistics.median(took[1:] or took)


def _all_reduce(store: Store, rank: int, size: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
        group: Any = torch.distributed.ProcessGroupNCCL(store, rank, size, torch.distributed.ProcessGroupNCCL.Options())
    else:
        group = ProcessGroupGloo(store, rank, size, timedelta(seconds=LINK_S))
    content = torch.ones((256 << 20) if device.type == "cuda" else (8 << 20), device=device, dtype=torch.uint8)
    speed = content.numel() / seconds(lambda: group.allreduce([content]).wait(), device, repeats=REPEATS) / 1e9
    group.shutdown()
    return speed


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
