"""Measures every node before a job trusts it: what computes slowly, cannot write, or has another clock is named.

A node is compared with the median of all: nobody knows how fast a machine should be, but its neighbours show it. All
ranks of a node measure at the same time, as they will train. The worst rank counts for its node, and the better one of
the links to two neighbours, since a slow link is the fault of either end. Torch, code, device and network are under
test, so ranks speak through the store where they have met. At each step rank 0 says who is there; what hangs or is
silent is an error of its node, and the others go on.
"""

import json
import os
import platform
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import CPU, ParallelContext, answers, listed
from megalite.launch.startup import code_fingerprint, gpu_id

INSIDE, ACROSS, CLOCK, ERROR, LINK = "inside, GB/s", "across, GB/s", "clock, s", "error", "link to "
PRODUCTS, COPIES, DISK = "matmul, TFLOP/s", "memory, GB/s", "disk, MB/s"
# Share of the median below which a node is slow; disks are shared and uneven.
LEAST = {PRODUCTS: 0.8, COPIES: 0.8, DISK: 0.3, INSIDE: 0.5, ACROSS: 0.5}
FARTHEST_S = 5.0  # of a clock from the median's
MEASURE_S = 1.5  # of products and of copies: long enough for a device to heat up
DISK_BYTES = 32 << 20
LINK_S, HANG_S, WAIT_S = 30.0, 60.0, 120.0  # for a link; for a rank's own measures; for the slowest rank, at each step

Measures = Mapping[str, Any]


def preflight(context: ParallelContext, folder: Path) -> dict[str, Measures]:
    """The measures of every node, by its name, on rank 0; nothing elsewhere. All ranks call it. `folder` is that of
    checkpoints; where it is missing, the nearest above it that a rank finds counts. UserError where a rank does not
    even say on which node it is."""
    here, there = os.environ.get("SLURMD_NODENAME") or socket.gethostname(), list[str]()
    mine, nodes = _Rank(context), defaultdict[str, list[int]](list)
    above = (folder.absolute(), *folder.absolute().parents)
    mine.in_time(HANG_S, ERROR, lambda: there.append(next(str(each) for each in above if each.is_dir())))
    places = mine.call("places", [here, context.device.type, gpu_id(context.device), "".join(there)])
    if absent := [rank for rank in range(context.world_size) if rank not in places]:
        rule = f"no answer within {WAIT_S:.0f} s from rank {listed(absent)}"
        raise UserError(Problem("preflight", context.world_size, rule, "look at their logs and nodes"))
    for rank, (name, *_) in places.items():
        nodes[name].append(rank)
    nearest = Path(max((place[3] for place in places.values()), key=len) or folder)
    mine.in_time(HANG_S, ERROR, lambda: mine.measure(nearest if nodes[here][0] == context.rank else None))
    sharers = [rank for rank, place in places.items() if place[:3] == places[context.rank][:3] and place[2]]
    if len(sharers) > 1:
        mine.own[ERROR] = f"ranks {listed(sharers)} share one GPU"
    mine.call("measured")
    if len({device for _, device, *_ in places.values()}) == 1:  # else NCCL would wait for gloo
        mine.measure_links(here, nodes)
    mine.own[CLOCK] = time.time()
    everyone = mine.call("measures", mine.own, to_first=True)
    silent = {ERROR: f"no answer within {WAIT_S:.0f} s"}
    of_nodes = {name: _of_node([everyone.get(rank, silent) for rank in ranks]) for name, ranks in nodes.items()}
    return {} if context.rank else of_nodes


def judge(nodes: Mapping[str, Measures]) -> tuple[dict[str, list[str]], list[str]]:
    """Faults by node; and what differs where no value is that of most nodes, so that nobody knows who is wrong."""
    faults, differences = defaultdict[str, list[str]](list), list[str]()
    lost = {node for node, measures in nodes.items() if not measures.get(ACROSS)}  # all of its links
    for name in dict.fromkeys(name for measures in nodes.values() for name in measures):
        values = {node: measures[name] for node, measures in nodes.items() if name in measures}
        certain = name in (*LEAST, ERROR) or name.startswith(LINK)
        usual = statistics.median(values.values()) if name in (*LEAST, CLOCK) else 0.0
        if name in LEAST:
            words = f"the median is {usual:.3g}"
            wrong = {node: f"{it:.3g}, {words}" for node, it in values.items() if it < LEAST[name] * usual}
        elif certain:  # a dead link is the fault of the end that has no other
            wrong = {node: it for node, it in values.items() if node in lost or name.removeprefix(LINK) not in lost}
        elif name == CLOCK:
            wrong = {node: f"{it - usual:+.1f}" for node, it in values.items() if abs(it - usual) > FARTHEST_S}
            values = {node: f"{it - usual:+.1f}" for node, it in values.items()}
        else:
            [(most, _)] = Counter(values.values()).most_common(1)
            wrong = {node: it for node, it in values.items() if it != most}
        if certain or 2 * len(wrong) < len(values):
            for node, words in wrong.items():
                faults[node].append(f"{name}: {words}")
        else:
            differences.append(f"they differ in {name}: {', '.join(f'{it} on {node}' for node, it in values.items())}")
    return faults, differences


def best(nodes: Mapping[str, Measures], keep: int) -> list[str]:
    """The nodes that shall train, in their order: those with the fewest faults, the fastest in products first."""
    faults, _ = judge(nodes)
    faulty = {node: (ERROR in measures, len(faults[node])) for node, measures in nodes.items()}
    chosen = sorted(nodes, key=lambda node: (*faulty[node], -nodes[node].get(PRODUCTS, 0.0)))[:keep]
    return [node for node in nodes if node in chosen]


def table(nodes: Mapping[str, Measures]) -> list[str]:
    """A line for each node, and one for each fault."""
    faults, differences = judge(nodes)
    lines = [f"{'node':<16}" + "".join(f"{name:>17}" for name in LEAST)] if nodes else []
    for node, measures in nodes.items():
        speeds = "".join(f"{measures[name]:>17.3g}" if name in measures else f"{'-':>17}" for name in LEAST)
        lines.append(f"{node:<16}{speeds}{'  <--' if node in faults else ''}")
    return lines + [f"{node}: {fault}" for node, found in faults.items() for fault in found] + differences


class _Rank:
    """One rank's measures, and the ranks that still answer, as rank 0 sees them: a silent one is waited for once."""

    def __init__(self, context: ParallelContext) -> None:
        self.context, self.own, self.there = context, dict[str, Any](), [*range(context.world_size)]

    def call(self, step: str, value: Any = None, *, to_first: bool = False) -> dict[int, Any]:
        """The values of the ranks that come in time, by rank. `to_first`: rank 0, which may end then, alone waits."""
        if self.context.store is None:
            return {0: value}
        store = PrefixStore(f"preflight/{step}", self.context.store)
        store.set(str(self.context.rank), json.dumps(value))
        if self.context.rank == 0:
            store.set("all", json.dumps([*answers(store, self.there, WAIT_S).items()]))
        elif to_first:
            return {}
        store.wait(["all"], timedelta(seconds=2 * WAIT_S))  # rank 0 may come late, and then wait for others
        values = dict(json.loads(store.get("all")))
        self.there = [*values]
        return values

    def in_time(self, limit_s: float, name: str, action: Callable[[], None]) -> None:
        """Perform the action; a measure of that name says where it fails or takes longer. What hangs (NCCL, a driver, a
        disk) stays in its thread."""

        def act() -> None:
            try:
                action()
                self.own.pop(name, None)
            except Exception as error:
                self.own[name] = f"{type(error).__name__}: {error}".splitlines()[0]

        self.own[name] = "TimeoutError: no answer in time"
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(limit_s)

    def measure(self, folder: Path | None) -> None:
        """All but the links; the disk where there is a `folder`."""
        own, device, cuda = self.own, self.context.device, self.context.device.type == "cuda"
        own |= {"python": platform.python_version(), "torch": torch.__version__, "megalite": code_fingerprint()}
        own["device"] = torch.cuda.get_device_name(device) if cuda else device.type
        size, dtype = (8192, torch.bfloat16) if cuda else (768, torch.float32)
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        own[PRODUCTS] = 2 * size**3 / seconds(lambda: left @ right, device, MEASURE_S) / 1e12
        source = torch.ones((1 << 30) if cuda else (64 << 20), device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        own[COPIES] = 2 * source.numel() / seconds(lambda: target.copy_(source), device, MEASURE_S) / 1e9
        if folder is not None:
            content = os.urandom(DISK_BYTES)
            own[DISK] = DISK_BYTES / seconds(lambda: write(folder, content), CPU, 0.0) / 1e6

    def measure_links(self, here: str, nodes: Mapping[str, Sequence[int]]) -> None:
        """Measure an all-reduce among the ranks of this node, and with the nodes beside it, 0 where it fails."""
        names = [*nodes]
        ring = [*zip(names, names[1:] + names[:1], strict=True)][: len(names) if len(names) > 2 else len(names) - 1]
        even = len(ring) // 2 * 2  # no node measures two links at a time
        for number, links in enumerate([[(name, name) for name in names], ring[0:even:2], ring[1:even:2], ring[even:]]):
            for one, other in links:
                ranks = nodes[one] if one == other else [nodes[one][0], nodes[other][0]]
                if self.context.rank in ranks and len(ranks) > 1 and {*ranks} <= {*self.there}:
                    speed, link = (INSIDE if one == other else ACROSS), f"{LINK}{other if one == here else one}"
                    self.own.setdefault(speed, 0.0)
                    self.in_time(LINK_S, link, partial(self.all_reduce, speed, f"{one} {other}", ranks))
            self.call(f"links {number}")

    def all_reduce(self, speed: str, link: str, ranks: Sequence[int]) -> None:
        """Measure the GB/s of a group that its members alone make, outside of torch's world."""
        device, rank, size = self.context.device, ranks.index(self.context.rank), len(ranks)
        store = PrefixStore(f"preflight/{link}", self.context.store.clone())  # type: ignore[union-attr]  # may hang
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
            nccl: Any = torch.distributed.ProcessGroupNCCL
            group = nccl(store, rank, size, nccl.Options())
        else:
            group = ProcessGroupGloo(store, rank, size, timedelta(seconds=LINK_S))
        content = torch.ones((256 if device.type == "cuda" else 8) << 20, device=device, dtype=torch.uint8)
        took = [seconds(lambda: group.allreduce([content]).wait(), device, 0.0) for _ in range(20)]
        group.shutdown()
        self.own[speed] = max(self.own[speed], content.numel() / statistics.median(took[1:]) / 1e9)


def write(folder: Path, content: bytes) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def seconds(action: Callable[[], Any], device: torch.device, at_least_s: float) -> float:
    """The median time of an action that is repeated for so long. A device that throttles is fast at first: the best, or
    a few milliseconds, would hide it."""
    took: list[float] = []
    while not took or sum(took) < at_least_s:
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - begin)
    return statistics.median(took[1:] or took)


def _of_node(ranks: Sequence[Measures]) -> Measures:
    """The worst speeds of its ranks, and all else of the first that has it."""
    speeds = {name: min(each[name] for each in ranks if name in each) for each in ranks for name in LEAST & each.keys()}
    return {name: value for each in reversed(ranks) for name, value in each.items()} | speeds
