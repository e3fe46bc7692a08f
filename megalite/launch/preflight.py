"""Measures every node before a job trusts it: what computes slowly, cannot write, or has another clock is named.

A node is compared with the median of all: nobody knows how fast a machine should be, but its neighbours show it. All
ranks of a node measure at the same time, as they will train. The worst rank counts for its node, and the better one of
the links to two neighbours, since a slow link is the fault of either end.

What hangs or is silent is an error of its node: rank 0 says at each step who is there, and the others go on.

Ranks speak through the store where they have met, and through nothing else: torch, code, device and network between
them are what is under test.
"""

import json
import os
import platform
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from megalite.launch.device import set_threads
from megalite.launch.environment import ProcessEnvironment
from megalite.launch.host import CUDA_QUEUES, cuda_queues_in_words
from megalite.launch.link_speed import in_time, link_speed, seconds
from megalite.launch.rendezvous import RankInfo, gpu_id, listed, rendezvous
from megalite.launch.startup import code_fingerprint
from megalite.layout.ranks import ParallelLayout

LEAST = {  # share of the median below which a node is slow; disks are shared and uneven
    "matmul, TFLOP/s": 0.8,
    "memory, GB/s": 0.8,
    "disk, MB/s": 0.3,
    "inside, GB/s": 0.5,
    "across, GB/s": 0.5,
}
FARTHEST_S = 5.0  # of a clock from the median's
MEASURE_S = 1.5  # of products and of copies: long enough for a device to heat up
DISK_BYTES = 32 << 20
HANG_S = 60.0  # for a rank's own figures
WAIT_S = 120.0  # for the slowest rank, at each step
PACKAGES = ("torch", "numpy", "hydra-core", "transformers", "tokenizers", "datasets")
NCCL = "communicators"
SEEN = (CUDA_QUEUES, NCCL)  # said even where all nodes have the same
CLOCK, ERROR, LINK = "clock, s", "error", "link to "

Figures = Mapping[str, float | str]


def meet(
    environment: ProcessEnvironment, device: torch.device, problems: Sequence[Problem], *, timeout_s: float
) -> ParallelContext:
    """A context without process groups. Unlike those of `startup.start` its ranks may differ in torch, code and device,
    and share a GPU.

    Raises one UserError, alike on all ranks, that holds the problems of all.
    """
    set_threads(environment)
    if environment.world_size == 1:
        if problems:
            raise UserError(problems)
        return ParallelContext(device=device)
    layout = ParallelLayout(dp=environment.world_size)
    info = replace(RankInfo.of(environment.rank, device, {}, problems), gpu=None)  # `preflight` compares them
    store = rendezvous(environment, info, timeout_s=timeout_s)
    return ParallelContext(layout, environment.rank, device, store=store)


def look_at_nodes(context: ParallelContext, run_dir: Path) -> list[str]:
    """What rank 0 tells of all nodes before a run; collective."""
    folder = run_dir.absolute()
    there = context.broadcast_object(str(next(each for each in folder.parents if each.is_dir())))  # rank 0's counts
    found = preflight(context, Path(there) / folder.name)
    return table(found) if found else []


def preflight(context: ParallelContext, folder: Path) -> dict[str, Figures]:
    """The figures of every node, by its name, on rank 0; nothing elsewhere. All ranks call it.

    `folder` is that of checkpoints; where it is missing its parent counts. Raises UserError where a rank does not even
    say on which node it is, or rank 0 is silent.
    """
    nodes: dict[str, list[int]] = {}
    users: dict[tuple[str, str], list[int]] = {}
    devices = set()
    names = _gather(context, "names", [node_name(), context.device.type, gpu_id(context.device)])
    if absent := [rank for rank in range(context.world_size) if rank not in names]:
        raise _silence(context, "names", absent)
    for rank, (name, device, gpu) in names.items():
        nodes.setdefault(name, []).append(rank)
        users.setdefault((name, gpu or f"of rank {rank}"), []).append(rank)
        devices.add(device)
    own = _measured(context.device, folder, writes=nodes[node_name()][0] == context.rank)
    for ranks in users.values():
        if len(ranks) > 1 and context.rank in ranks:
            own[ERROR] = f"ranks {listed(ranks)} share one GPU"
    there = _gather(context, "measured", among=names)
    if len(devices) == 1:  # else NCCL would wait for gloo
        links, there = _links(context, nodes, there)
        own |= links
    own[CLOCK] = time.time()
    everyone = _gather(context, "figures", own, among=there, to_first=True)
    if context.rank > 0:
        return {}
    for rank in range(context.world_size):
        everyone.setdefault(rank, {ERROR: f"no answer within {WAIT_S:.0f} s from rank {rank}"})
    return {name: _of_node([everyone[rank] for rank in ranks]) for name, ranks in nodes.items()}


def node_name() -> str:
    """What the scheduler calls this machine, or the machine itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def judge(nodes: Mapping[str, Figures]) -> dict[str, list[str]]:
    """Faults by node; nodes without faults are left out."""
    faults: dict[str, list[str]] = {}
    for name, values in _by_figure(nodes).items():
        usual = _usual(name, values)
        for node, value in values.items():
            told = _told(name, value, usual)
            if name.startswith(LINK) and _lost(nodes[name.removeprefix(LINK)]) and not _lost(nodes[node]):
                told = ""  # the other end has lost all of its links
            if told:
                faults.setdefault(node, []).append(told)
    return faults


def differences(nodes: Mapping[str, Figures]) -> list[str]:
    """What differs where no value is the one of most nodes: nobody knows who is wrong."""
    lines = []
    for name, values in _by_figure(nodes).items():
        if _usual(name, values) is None:
            first = next(iter(values.values()))
            shown = (
                f"{value if isinstance(value, str) else f'{value - first:+.1f}'} on {node}"
                for node, value in values.items()
            )
            lines.append(f"they differ in {name}: {', '.join(shown)}")
    return lines


def best(nodes: Mapping[str, Figures], keep: int) -> list[str]:
    """The nodes that shall train, in their order: those without errors, then without faults, before others, fast ones
    before slow ones."""
    faults = judge(nodes)
    medians = {name: statistics.median(float(each.get(name, 0.0)) for each in nodes.values()) for name in LEAST}

    def rank_of(node: str) -> tuple[bool, int, float]:
        shares = [float(nodes[node].get(name, 0.0)) / usual for name, usual in medians.items() if usual]
        return ERROR in nodes[node], len(faults.get(node, [])), -min(shares, default=0.0)

    chosen = sorted(nodes, key=rank_of)[:keep]
    return [node for node in nodes if node in chosen]


def table(nodes: Mapping[str, Figures]) -> list[str]:
    """A line for each node, and one for each fault."""
    faults = judge(nodes)
    clock = statistics.median(float(figures[CLOCK]) for figures in nodes.values() if CLOCK in figures)
    lines = [f"{'node':<16}" + "".join(f"{name:>17}" for name in LEAST) + f"{CLOCK:>10}"]
    for node, figures in nodes.items():
        speeds = "".join(f"{figures[name]:>17.3g}" if name in figures else f"{'-':>17}" for name in LEAST)
        ahead = f"{float(figures[CLOCK]) - clock:>+10.2f}" if CLOCK in figures else f"{'-':>10}"
        lines.append(f"{node:<16}{speeds}{ahead}{'  <--' if node in faults else ''}")
    seen = {name: dict.fromkeys(found.values()) for name, found in _by_figure(nodes).items() if name in SEEN}
    lines += [f"{name}: {'; '.join(values)}" for name, values in seen.items()]
    return lines + [f"{node}: {fault}" for node, found in faults.items() for fault in found] + differences(nodes)


def _by_figure(nodes: Mapping[str, Figures]) -> dict[str, dict[str, Any]]:
    """{figure: {node: value}}"""
    names = dict.fromkeys(name for figures in nodes.values() for name in figures)
    return {name: {node: figures[name] for node, figures in nodes.items() if name in figures} for name in names}


def _usual(name: str, values: Mapping[str, Any]) -> float | str | None:
    """What most nodes have; None where no such majority is. Empty for what no node should have."""
    if name == ERROR or name.startswith(LINK):
        return ""
    if any(isinstance(value, str) for value in values.values()):
        [(value, count)] = Counter(values.values()).most_common(1)
        return str(value) if 2 * count > len(values) else None
    median = statistics.median(values.values())
    near = sum(abs(value - median) <= FARTHEST_S for value in values.values())
    return None if name == CLOCK and 2 * near <= len(values) else median


def _told(name: str, value: Any, usual: float | str | None) -> str:
    """What is wrong with a figure; empty: nothing."""
    if usual is None:
        return ""
    if isinstance(usual, str):
        return f"{name}: {value}" if value != usual else ""
    if name == CLOCK:
        return f"{name}: {value - usual:+.1f}" if abs(value - usual) > FARTHEST_S else ""
    return f"{name}: {value:.3g}, the median is {usual:.3g}" if value < LEAST[name] * usual else ""


def _lost(figures: Figures) -> bool:
    """Whether none of a node's links works."""
    return not figures.get("across, GB/s")


def _gather(
    context: ParallelContext, step: str, value: Any = None, *, among: Iterable[int] = (), to_first: bool = False
) -> dict[int, Any]:
    """The value of each rank that comes in time, by rank: those `among` (all) that rank 0 has seen. `to_first`: rank 0
    alone waits and reads. UserError where rank 0 is silent."""
    if context.store is None:
        return {0: value}
    store = PrefixStore(f"preflight/{step}", context.store)
    store.set(str(context.rank), json.dumps(value))
    if context.rank == 0:
        ranks = [*among] or [*range(context.world_size)]
        with suppress(RuntimeError):
            store.wait([str(rank) for rank in ranks], timedelta(seconds=WAIT_S))
        there = [rank for rank in ranks if store.check([str(rank)])]
        values = store.multi_get([str(rank) for rank in there])
        store.set("all", json.dumps([[rank, json.loads(text)] for rank, text in zip(there, values, strict=True)]))
    elif to_first:
        return {}
    try:
        store.wait(["all"], timedelta(seconds=2 * WAIT_S))  # rank 0 may come late, and then wait for others
    except RuntimeError as error:
        raise _silence(context, step, [0]) from error
    return dict(json.loads(store.get("all")))


def _silence(context: ParallelContext, step: str, ranks: Sequence[int]) -> UserError:
    rule = f"no answer within {WAIT_S:.0f} s from ranks {listed(ranks)} ({step})"
    return UserError(Problem("preflight", context.world_size, rule, "look at their logs and nodes"))


def _measured(device: torch.device, folder: Path, *, writes: bool) -> dict[str, Any]:
    """This rank's own figures. What fails or hangs is an error of its node."""
    own: dict[str, Any] = {}
    try:
        in_time(lambda: _measure(own, device, folder, writes=writes), HANG_S)
    except (OSError, RuntimeError) as error:
        return {**own, ERROR: _in_words(error)}
    return own


def _measure(own: dict[str, Any], device: torch.device, folder: Path, *, writes: bool) -> None:
    """Fills `own`, so that what was measured before something hangs is kept."""
    cuda = device.type == "cuda"
    own |= {name: _version(name) for name in PACKAGES}
    own |= {"python": platform.python_version(), "device": _device_name(device), "megalite": code_fingerprint()}
    if cuda:
        own |= {CUDA_QUEUES: cuda_queues_in_words(os.environ), NCCL: aborts_in_words()}
    size, dtype = (8192, torch.bfloat16) if cuda else (768, torch.float32)
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    own["matmul, TFLOP/s"] = 2 * size**3 / seconds(lambda: left @ right, device, at_least_s=MEASURE_S) / 1e12
    source = torch.ones((1 << 30) if cuda else (64 << 20), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device, at_least_s=MEASURE_S)
    own["memory, GB/s"] = 2 * source.numel() / copy_s / 1e9
    if writes:
        own["disk, MB/s"] = DISK_BYTES / seconds(lambda: _write(folder), torch.device("cpu")) / 1e6


def _links(
    context: ParallelContext, nodes: Mapping[str, Sequence[int]], there: dict[int, Any]
) -> tuple[dict[str, float | str], dict[int, Any]]:
    """GB/s of an all-reduce among the ranks of this node, and with the nodes beside it, a dead link has 0; and which of
    the ranks that were there still are."""
    names = [*nodes]
    pairs = [*zip(names, names[1:] + names[:1], strict=True)][: len(names) if len(names) > 2 else len(names) - 1]
    even = len(pairs) // 2 * 2  # nobody measures two links at a time
    rounds: list[Sequence[tuple[str, ...]]] = [
        [(name,) for name in names],
        pairs[0:even:2],
        pairs[1:even:2],
        pairs[even:],
    ]
    found: dict[str, float | str] = {}
    for number, sets in enumerate(rounds):
        for ends in sets:
            ranks = nodes[ends[0]] if len(ends) == 1 else [nodes[end][0] for end in ends]
            if context.rank not in ranks or len(ranks) == 1 or not there.keys() >= {*ranks}:
                continue
            assert context.store is not None, "several ranks have met"
            figure = "inside, GB/s" if len(ends) == 1 else "across, GB/s"
            try:
                own = context.store.clone()  # type: ignore[attr-defined]  # a connection that may hang
                store = PrefixStore(f"preflight/{'-'.join(ends)}", own)
                speed = link_speed(store, ranks.index(context.rank), len(ranks), context.device)
            except (OSError, RuntimeError) as error:
                speed, other = 0.0, next((end for end in ends if end != node_name()), node_name())
                found[f"{LINK}{other}"] = _in_words(error)
            found[figure] = max(found.get(figure, 0.0), speed)
        there = _gather(context, f"links {number}", among=there)  # who is silent is waited for once
    return found, there


def aborts_in_words() -> str:
    """How a rank that fails ends its communicators with this torch (context.py)."""
    nccl = getattr(torch.distributed, "ProcessGroupNCCL", None)
    return "aborted in one group" if hasattr(nccl, "_group_start") else "this torch cannot abort them in one group"


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "missing"


def _write(folder: Path) -> None:
    """Into the folder, or where it would be made: a mount point that is missing is an error, not made."""
    with tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent) as file:
        file.write(os.urandom(1 << 20) * (DISK_BYTES >> 20))
        file.flush()
        os.fsync(file.fileno())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return f"{device.type}, {next(line.partition(': ')[2] for line in lines if line.startswith('model name'))}"
    return device.type


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'without a word').splitlines()[0]}"


def _of_node(ranks: Sequence[Figures]) -> Figures:
    """The worst figure of its ranks, by name; the clock of the first."""
    found: dict[str, float | str] = {}
    for name in dict.fromkeys(name for figures in ranks for name in figures):
        values = [figures[name] for figures in ranks if name in figures]
        found[name] = values[0] if name == CLOCK or isinstance(values[0], str) else min(values, key=float)
    return found
