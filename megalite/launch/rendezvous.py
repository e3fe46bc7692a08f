"""Lets the ranks of a job find each other, or tells all of them why they cannot.

They meet at a store before any process group exists. Rank 0 opens a round. Every rank leaves there what it is (its
host, its GPU, its plan, its problems). Then rank 0 leaves the verdict: who takes part, and the problems that all ranks
raise alike. So a missing rank is named, a rank without a GPU stops the others at once, and ranks of different plans do
not wait for each other's groups.

A store of torchrun's outlives the ranks, and a restart must not take what dead ranks have left for its own; torchrun
gives ranks no number of the restart that is alike on all nodes. So a verdict counts only for the processes that it
names: a rank that finds an old round leaves its information in the next one again.
"""

import json
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from megalite.errors.problems import Problem, UserError, refuse
from megalite.launch.environment import ProcessEnvironment, is_loopback

CONNECT_S = 30.0  # for what listens already; torch's client retries for so long, each time with a trace of C++ frames
LONGEST_PAUSE_S = 0.5  # between two questions to the store
ROUND = "megalite/round"  # the token of the rank 0 that has opened the newest one


@dataclass(frozen=True)
class RankInfo:
    """What a rank leaves for the others."""

    rank: int
    host: str
    gpu: str | None  # unique id of the device, None on the CPU
    gloo_on_loopback: bool
    plan: Mapping[str, str]  # what must be equal on all ranks, by name, unless at its default; empty beside problems
    problems: Sequence[dict[str, Any]]
    pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this process

    @classmethod
    def of(cls, rank: int, device: torch.device, plan: Mapping[str, str], problems: Sequence[Problem]) -> "RankInfo":
        """The information about this process."""
        fields = [problem.as_json() for problem in problems]
        return cls(rank, socket.gethostname(), gpu_id(device), _gloo_on_loopback(), plan, fields)


def rendezvous(
    environment: ProcessEnvironment, info: RankInfo, *, timeout_s: float, store: Store | None = None
) -> Store:
    """Wait until all ranks are there; a store for what follows. Raises one UserError, alike on all ranks.

    They meet at `store`, by default at MASTER_ADDR:MASTER_PORT.
    """
    store = store or _open_store(environment, time.monotonic() + timeout_s)
    try:
        place, problems = (_attend if info.rank else _judge)(store, info, environment.world_size, timeout_s)
    except DistError as error:
        rule = "left before all ranks had arrived"
        raise UserError(Problem("RANK", 0, rule, "look for the last words of rank 0", alone=True)) from error
    refuse(problems)
    return PrefixStore("groups", place)


def _judge(store: Store, info: RankInfo, size: int, timeout_s: float) -> tuple[Store, list[Problem]]:
    """Open a round on rank 0 and wait for all ranks: the place of the round, and what stands against starting."""
    place, ranks = PrefixStore(f"megalite/{info.token}", store), [f"ranks/{rank}" for rank in range(size)]
    place.set(ranks[0], json.dumps(asdict(info)))
    store.set(ROUND, info.token)
    wait_until(lambda: place.check(ranks), time.monotonic() + timeout_s)
    infos = [RankInfo(**json.loads(place.get(key))) for key in ranks if place.check([key])]
    problems = find_problems(infos)
    if missing := sorted({*range(size)} - {each.rank for each in infos}):
        rule = f"{len(infos)} of {size} ranks arrived within parallel.startup_timeout_s; missing: {listed(missing)}"
        problems.append(Problem("WORLD_SIZE", size, rule, "look at the logs of the missing ranks, or start fewer"))
    verdict = [[each.token for each in infos], [problem.as_json() for problem in problems]]
    place.set("verdict", json.dumps(verdict))
    if problems:
        time.sleep(2 * LONGEST_PAUSE_S)  # the store may live in this process: it stays until the others have read
    return place, problems


def _attend(store: Store, info: RankInfo, size: int, timeout_s: float) -> tuple[Store, list[Problem]]:
    """Leave `info` in the newest round, and wait for a verdict that names this process."""
    found: list[tuple[Store, list[Problem]]] = []
    left: dict[str, RankInfo] = {}  # by the token of a round, who has taken this rank's place there; sent once

    def judged() -> bool:
        if not store.check([ROUND]):
            return False
        place = PrefixStore(f"megalite/{(token := store.get(ROUND).decode())}", store)
        if token not in left:
            taken = place.compare_set(f"ranks/{info.rank}", "", json.dumps(asdict(info)))
            left[token] = RankInfo(**json.loads(taken))
        first = left[token]
        if first.token != info.token and not _agent_serves():  # else it is of a rank that has died
            both = " and ".join(f"process {each.pid} on {each.host}" for each in (first, info))
            rule = f"{both} both claim this rank, or belong to two jobs that meet at the same port"
            hint = "give each process its own RANK, and each job its own MASTER_PORT"
            raise UserError(Problem("RANK", info.rank, rule, hint, alone=True))
        tokens, fields = json.loads(place.get("verdict")) if place.check(["verdict"]) else ([], [])
        found[:] = [(place, [Problem(**each) for each in fields])]
        return info.token in tokens

    if not wait_until(judged, time.monotonic() + 2 * timeout_s):  # rank 0 may have come late, and then waits for others
        rule = "did not come within parallel.startup_timeout_s"
        raise UserError(Problem("RANK", 0, rule, "look at the logs of rank 0", alone=True))
    return found[0]


def _agent_serves() -> bool:
    """Whether torchrun has opened the store, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def find_problems(infos: Sequence[RankInfo]) -> list[Problem]:
    """Everything that stands against starting, once each. Ranks of different plans would wait for each other for ever,
    or train different models."""
    found = [Problem(**fields) for info in infos for fields in info.problems]
    planned = [info for info in infos if info.plan]
    for name in dict.fromkeys(name for info in planned for name in info.plan):
        holders: dict[str, list[RankInfo]] = defaultdict(list)
        for info in planned:
            holders[info.plan.get(name, "default")].append(info)
        (first, where), *others = (
            (text, f"rank {listed([each.rank for each in who])} ({who[0].host})") for text, who in holders.items()
        )
        rule = f"so on {where}, but {', '.join(f'{text!r} on {there}' for text, there in others[:4])}"
        if others:
            found.append(Problem(name, first, rule, "start every rank with the same settings, files and versions"))
    users: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for info in infos:
        users[info.host, info.gpu].append(info.rank)
    for (host, gpu), ranks in users.items():
        if gpu is not None and len(ranks) > 1:
            rule = f"ranks {listed(ranks)} of {host} share one GPU"
            found.append(Problem("device", "cuda", rule, "at most one rank per GPU, or device=cpu"))
    several = len({info.host for info in infos}) > 1
    for host in (info.host for info in infos if several and info.gloo_on_loopback):
        rule = f"the name of host {host} resolves to its loopback address, which other nodes cannot reach"
        hint = "GLOO_SOCKET_IFNAME=<network interface>, or correct /etc/hosts"
        found.append(Problem("GLOO_SOCKET_IFNAME", None, rule, hint))
    return list(dict.fromkeys(found))


def _open_store(environment: ProcessEnvironment, deadline: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT. Rank 0 opens it, unless torchrun's agent already has. At a loopback address
    it listens there alone; torch's own listening socket is open to every network of the host."""
    host, port, size = environment.master_addr, environment.master_port, environment.world_size
    serves, listening = environment.rank == 0 and not _agent_serves(), None
    try:
        if not serves:
            _await_server(host, port, deadline)
        elif (family := socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]) and is_loopback(host):
            listening = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN).detach()
        left = max(1.0, deadline - time.monotonic())
        connecting = timedelta(seconds=min(left, CONNECT_S))
        store = TCPStore(host, port, size, serves, connecting, wait_for_workers=False, master_listen_fd=listening)
        store.set_timeout(timedelta(seconds=left))
        return store
    except (OSError, UnicodeError, DistError) as error:
        rule = f"rank {environment.rank} found nobody there: {str(error).splitlines()[0]}"
        hint = "check that rank 0 runs, that MASTER_ADDR is its host, and that no firewall closes MASTER_PORT"
        if "EADDRINUSE" in str(error) or "Address already in use" in str(error):
            rule = "the port is in use on this host, perhaps by another job"
            hint = "another MASTER_PORT; with torchrun --standalone, or --master-port"
        # Each rank that comes to know it says so: nobody else may.
        raise UserError(Problem("MASTER_ADDR:MASTER_PORT", f"{host}:{port}", rule, hint, alone=True)) from error


def _await_server(host: str, port: int, deadline: float) -> None:
    """Wait until something listens at the port, or raise the last OSError. (torch's own client logs C++ traces while it
    retries.)"""
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Whether the condition came true in time. Asks often at first, then less: thousands of ranks may be asking."""
    pause = 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_S)
    return True


def listed(ranks: Sequence[int | str]) -> str:
    """The first few of many ranks or hosts, in words."""
    return ", ".join([*map(str, ranks[:8]), *(["..."] if len(ranks) > 8 else [])])


def gpu_id(device: torch.device) -> str | None:
    """Unique among all GPUs; None on the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _gloo_on_loopback() -> bool:
    """Whether gloo, which binds to the address of the host's own name, would bind where other nodes cannot reach it."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True  # gloo falls back to loopback
