"""Measures every node before a job trusts it: what computes slowly, cannot write, or has another clock is named.

A node is compared with the median of all: nobody knows how fast a machine should be, but its neighbours show it. All
ranks of a node measure at the same time, as they will train. Of its figures the worst rank's counts; of its links to
two neighbours the better one, since a slow link is the fault of either end.
"""

import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.launch.context import ParallelContext

REPEATS = 5  # of each measurement, of which the best counts
LEAST = {  # share of the median below which a node is slow; disks are shared and uneven
    "matmul, TFLOP/s": 0.8,
    "memory, GB/s": 0.8,
    "disk, MB/s": 0.3,
    "inside, GB/s": 0.5,
    "across, GB/s": 0.5,
}
FARTHEST_S = 5.0  # of a clock from the median's
DISK_BYTES = 32 << 20
PACKAGES = ("torch", "numpy", "hydra-core", "transformers", "tokenizers", "datasets")

Figures = Mapping[str, float | str]


def preflight(context: ParallelContext, folder: Path) -> dict[str, Figures]:
    """The figures of every node, by its name, the same on all ranks; collective. `folder`: of checkpoints."""
    nodes: dict[str, list[int]] = {}
    for rank, [name] in enumerate(context.gather_json([node_name()])):
        nodes.setdefault(name, []).append(rank)
    own = _measure(context.device, folder, writes=nodes[node_name()][0] == context.rank)
    own |= _links(context, [*nodes.values()])
    context.barrier(patient=True)
    own["clock, s"] = time.time()
    everyone = context.gather_json([own])
    return {name: _of_node([everyone[rank][0] for rank in ranks]) for name, ranks in nodes.items()}


def node_name() -> str:
    """What the scheduler calls this machine, or the machine itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def judge(nodes: Mapping[str, Figures]) -> dict[str, list[str]]:
    """By node, what is wrong with it; nodes that are well are left out."""
    faults: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for figures in nodes.values() for name in figures):
        values = {node: figures[name] for node, figures in nodes.items() if name in figures}
        numbers = {node: value for node, value in values.items() if not isinstance(value, str)}
        usual = statistics.median(numbers.values()) if numbers else 0.0
        most = statistics.mode(values.values())
        for node, value in values.items():
            if isinstance(value, str):
                told = f"{name}: {value}" if value != most or name == "error" else ""
            elif name == "clock, s":
                told = f"{name}: {value - usual:+.1f}" if abs(value - usual) > FARTHEST_S else ""
            else:
                told = f"{name}: {value:.3g}, the median is {usual:.3g}" if value < LEAST[name] * usual else ""
            if told:
                faults.setdefault(node, []).append(told)
    return faults


def best(nodes: Mapping[str, Figures], keep: int) -> list[str]:
    """The nodes that shall train: those without faults before others, fast ones before slow ones, in their order."""
    faults = judge(nodes)
    medians = {name: statistics.median(float(each.get(name, 0.0)) for each in nodes.values()) for name in LEAST}

    def rank_of(node: str) -> tuple[int, float]:
        shares = [float(nodes[node].get(name, 0.0)) / usual for name, usual in medians.items() if usual]
        return len(faults.get(node, [])), -min(shares, default=0.0)

    chosen = sorted(nodes, key=rank_of)[:keep]
    return [node for node in nodes if node in chosen]


def table(nodes: Mapping[str, Figures]) -> list[str]:
    """A line for each node, and one for each fault."""
    faults = judge(nodes)
    clock = statistics.median(float(figures["clock, s"]) for figures in nodes.values())
    lines = [f"{'node':<16}" + "".join(f"{name:>17}" for name in LEAST) + f"{'clock, s':>10}"]
    for node, figures in nodes.items():
        speeds = "".join(f"{figures[name]:>17.3g}" if name in figures else f"{'-':>17}" for name in LEAST)
        lines.append(
            f"{node:<16}{speeds}{float(figures['clock, s']) - clock:>+10.2f}{'  <--' if node in faults else ''}"
        )
    return lines + [f"{node}: {fault}" for node, found in faults.items() for fault in found]


def _measure(device: torch.device, folder: Path, *, writes: bool) -> dict[str, float | str]:
    """This rank's own figures. What fails is an error of its node."""
    cuda = device.type == "cuda"
    own: dict[str, float | str] = {name: _version(name) for name in PACKAGES}
    own |= {"python": platform.python_version(), "device": _device_name(device)}
    try:
        size, dtype = (8192, torch.bfloat16) if cuda else (768, torch.float32)
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        own["matmul, TFLOP/s"] = 2 * size**3 / _seconds(lambda: left @ right, device) / 1e12
        source = torch.ones((1 << 30) if cuda else (64 << 20), device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        own["memory, GB/s"] = 2 * source.numel() / _seconds(lambda: target.copy_(source), device) / 1e9
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            own["disk, MB/s"] = DISK_BYTES / _seconds(lambda: _write(folder), torch.device("cpu"), repeats=1) / 1e6
    except (OSError, RuntimeError) as error:
        own["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return own


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "missing"


def _links(context: ParallelContext, nodes: Sequence[Sequence[int]]) -> dict[str, float]:
    """GB/s of an all-reduce among the ranks of this node, and with the nodes beside it. All ranks call it."""
    if context.control_group is None:
        return {}
    ring = [[ranks[0], nodes[(at + 1) % len(nodes)][0]] for at, ranks in enumerate(nodes)] if len(nodes) > 1 else []
    even = len(ring) // 2 * 2  # nobody measures two links at a time
    rounds = [("across, GB/s", pairs) for pairs in (ring[0:even:2], ring[1:even:2], ring[even:])]
    found: dict[str, float] = {}
    for name, sets in [("inside, GB/s", nodes), *rounds]:
        for ranks in (sorted(ranks) for ranks in sets):
            backend = "nccl" if context.device.type == "cuda" else "gloo"
            group = dist.new_group(ranks, backend=backend) if len(ranks) > 1 else None
            if context.rank in ranks and group is not None:
                found[name] = max(found.get(name, 0.0), _all_reduce(group, context.device))
                dist.destroy_process_group(group)
        context.barrier(patient=True)
    return found


def _all_reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    content = torch.ones((256 << 20) if device.type == "cuda" else (8 << 20), device=device, dtype=torch.uint8)
    return content.numel() / _seconds(lambda: dist.all_reduce(content, group=group), device) / 1e9


def _seconds(action: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Of the fastest of some repetitions, after one that warms up."""
    took = []
    for _ in range(repeats + (repeats > 1)):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - begun)
    return min(took)


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(os.urandom(1 << 20) * (DISK_BYTES >> 20))
        file.flush()
        os.fsync(file.fileno())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return device.type


def _of_node(ranks: Sequence[Figures]) -> Figures:
    """The worst figure of its ranks, by name; the clock of the first."""
    found: dict[str, float | str] = {}
    for name in dict.fromkeys(name for figures in ranks for name in figures):
        values = [figures[name] for figures in ranks if name in figures]
        found[name] = values[0] if name == "clock, s" or isinstance(values[0], str) else min(values, key=float)
    return found
