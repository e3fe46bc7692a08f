"""Lets the ranks of a job find each other, or tells all of them why they cannot.

They meet at a store before any process group exists. Each rank leaves what it is (its host, its GPU, its plan, its
problems). When all have arrived, rank 0 reads all of that and leaves the verdict: nothing, or the problems that all
ranks then raise alike. So a missing rank is named, a rank without a GPU stops the others at once, and ranks of
different plans do not wait for each other's groups.

A store of torchrun's outlives the ranks, and a restart must not take what dead ranks have left for its own. torchrun
tells ranks no number of the restart that is alike on all nodes: `TORCHELASTIC_RESTART_COUNT` is each agent's own. So
rank 0 counts attempts in the store, and each attempt has keys of its own. A rank that comes before rank 0 finds the
attempt before. Nobody is let in there any more, as only its rank 0 could, which has ended: the rank waits there until
rank 0 begins the next one.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import problem_fields
from megalite.launch.environment import ProcessEnvironment, is_loopback

CONNECT_S = 30.0  # for what listens already; torch's client retries for so long, each time with a trace of C++ frames


@dataclass(frozen=True)
class RankInfo:
    """What a rank leaves for the others."""

    rank: int
    host: str
    pid: int
    gpu: str | None  # unique id of the device, None on the CPU
    gloo_on_loopback: bool
    plan: Mapping[str, str]  # what must be equal on all ranks, by name, unless at its default; empty beside problems
    problems: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, rank: int, device: torch.device, plan: Mapping[str, str], problems: Sequence[Problem]) -> "RankInfo":
        """The information about this process."""
        fields = [*map(problem_fields, problems)]
        return cls(rank, socket.gethostname(), os.getpid(), gpu_id(device), _gloo_on_loopback(), plan, fields)


def rendezvous(
    environment: ProcessEnvironment, info: RankInfo, *, timeout_s: float, store: Store | None = None
) -> Store:
    """Wait until all ranks are there; a store for what follows. Raises one UserError, alike on all ranks.

    They meet at `store`, by default at MASTER_ADDR:MASTER_PORT.
    """
    deadline = time.monotonic() + timeout_s
    store, problems = store or _open_store(environment, deadline), None
    try:
        while problems is None:
            attempt = store.add("megalite/attempts", 1 if info.rank == 0 else 0)
            place = PrefixStore(f"megalite/{attempt}", store)
            is_over = partial(_is_over, store, attempt, info.rank)
            problems = _attend(place, environment.world_size, info, deadline, is_over)
    except DistError as error:
        rule = "left before all ranks had arrived"
        raise UserError(Problem("RANK", 0, rule, "look for the last words of rank 0", alone=True)) from error
    if problems:
        raise UserError(problems)
    return PrefixStore("groups", place)


def _is_over(store: Store, attempt: int, rank: int) -> bool:
    """Whether rank 0 has begun another attempt since."""
    return rank > 0 and store.add("megalite/attempts", 0) > attempt


def _attend(
    store: Store, size: int, info: RankInfo, deadline: float, is_over: Callable[[], bool]
) -> list[Problem] | None:
    """Take this rank's place in an attempt and wait for the verdict: what stands against starting. None: the attempt is
    over."""

    def judge(problems: Sequence[Problem]) -> None:
        """The first verdict counts."""
        store.compare_set("verdict", "", json.dumps([*map(problem_fields, problems)]))

    def judged() -> bool:
        return store.check(["verdict"])

    ranks = [f"ranks/{rank}" for rank in range(size)]
    store.add("present", 1)
    refused = _take_place(store, size, info)
    if (refused or judged()) and info.rank > 0 and _agent_serves() and wait_until(is_over, deadline):
        return None
    if refused:
        judge(refused)
    elif info.rank == 0:
        wait_until(lambda: judged() or store.check(ranks), deadline)
        if store.check(ranks):
            judge(find_problems([RankInfo(**json.loads(text)) for text in store.multi_get(ranks)]))
    if not wait_until(lambda: judged() or is_over(), deadline):
        judge([_absence([rank for rank in range(size) if not store.check([ranks[rank]])], size)])
    if is_over():
        return None
    verdict = [Problem(**fields) for fields in json.loads(store.get("verdict"))]
    if verdict or refused:
        store.add("readers", 1)
        if info.rank == 0:  # the store may live in this process: it stays until the others have read, too
            wait_until(lambda: store.add("readers", 0) >= store.add("present", 0), time.monotonic() + 3)
    return verdict or refused  # who is refused may come after the others have been let in


def _take_place(store: Store, size: int, info: RankInfo) -> list[Problem]:
    """Leave `info`, or say why this process cannot be the rank that it says it is."""
    told = int(store.compare_set("world_size", "", str(size)))
    if told != size:
        rule = f"other ranks of this job were told a world of {told}"
        return [Problem("WORLD_SIZE", size, rule, "start every process with the same WORLD_SIZE")]
    first = RankInfo(**json.loads(store.compare_set(f"ranks/{info.rank}", "", json.dumps(asdict(info)))))
    if (first.host, first.pid) != (info.host, info.pid):
        both = " and ".join(f"process {one.pid} on {one.host}" for one in (first, info))
        rule = f"{both} both claim this rank, or belong to two jobs that meet at the same port"
        return [Problem("RANK", info.rank, rule, "give each process its own RANK, and each job its own MASTER_PORT")]
    return []


def _absence(missing: Sequence[int], size: int) -> Problem:
    """Ranks that did not come, or went elsewhere: torchrun's agents keep the address of the first round's store."""
    came = f"{size - len(missing)} of {size} ranks arrived within parallel.startup_timeout_s"
    remedy = "look at the logs of the missing ranks, or start fewer"
    if _agent_serves() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        remedy += "; if a node has come or gone, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all"
    return Problem("WORLD_SIZE", size, f"{came}; missing: {listed(missing)}", remedy, alone=0 in missing)


def _agent_serves() -> bool:
    """Whether torchrun has opened the store, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def find_problems(infos: Sequence[RankInfo]) -> list[Problem]:
    """Everything that stands against starting, each once."""
    found = [Problem(**fields) for info in infos for fields in info.problems]
    found += _differences([info for info in infos if info.plan])
    users: dict[tuple[str, str], list[int]] = {}
    for info in infos:
        if info.gpu is not None:
            users.setdefault((info.host, info.gpu), []).append(info.rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            rule = f"ranks {listed(ranks)} of {host} share one GPU"
            found.append(Problem("device", "cuda", rule, "at most one rank per GPU, or device=cpu"))
    several = len({info.host for info in infos}) > 1
    for host in (info.host for info in infos if info.gloo_on_loopback and several):
        rule = f"the name of host {host} resolves to its loopback address, which other nodes cannot reach"
        remedy = "GLOO_SOCKET_IFNAME=<network interface>, or correct /etc/hosts"
        found.append(Problem("GLOO_SOCKET_IFNAME", None, rule, remedy))
    return list(dict.fromkeys(found))


def _differences(infos: Sequence[RankInfo]) -> Iterator[Problem]:
    """What the ranks plan differently: they would wait for each other for ever, or train different models."""
    several = len({info.host for info in infos}) > 1

    def named(who: Sequence[RankInfo]) -> str:
        ranks = f"rank{'s' if len(who) > 1 else ''} {listed([info.rank for info in who])}"
        hosts = [*dict.fromkeys(info.host for info in who)]
        return f"{ranks} ({listed(hosts)})" if several else ranks

    for name in dict.fromkeys(name for info in infos for name in info.plan):
        holders: dict[str, list[RankInfo]] = {}
        for info in infos:
            holders.setdefault(info.plan.get(name, "default"), []).append(info)
        if len(holders) > 1:
            (first, those), *others = holders.items()
            shown = ", ".join(f"{text!r} on {named(who)}" for text, who in others[:4])
            remedy = "start every rank with the same settings, the same files and the same versions"
            yield Problem(name, first, f"so on {named(those)}, but {shown}", remedy)


def _open_store(environment: ProcessEnvironment, deadline: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT. Rank 0 opens it, unless torchrun's agent already has. At a loopback address
    it listens there alone; torch's own listening socket is open to every network of the host."""
    host, port = environment.master_addr, environment.master_port
    serves, listening = environment.rank == 0 and not _agent_serves(), None
    try:
        if serves and is_loopback(host):
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN).detach()
        elif serves:
            socket.getaddrinfo(host, port)
        else:
            _await_server(host, port, deadline)
        left = max(1.0, deadline - time.monotonic())
        connecting = timedelta(seconds=min(left, CONNECT_S))
        size = environment.world_size
        store = TCPStore(host, port, size, serves, connecting, wait_for_workers=False, master_listen_fd=listening)
        store.set_timeout(timedelta(seconds=left))
        return store
    except (OSError, UnicodeError, DistError) as error:
        remedy = "check that rank 0 runs, that MASTER_ADDR is its host, and that no firewall closes MASTER_PORT"
        rule = f"rank {environment.rank} found nobody there: {error}"
        if "EADDRINUSE" in str(error) or (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
            rule = "the port is in use on this host, perhaps by another job"
            remedy = "another MASTER_PORT; with torchrun --standalone, or --master-port"
        elif isinstance(error, DistError):
            rule = f"what listens there does not answer as rank 0 of megalite does: {str(error).splitlines()[0]}"
        # Each rank that comes to know it says so: nobody else may.
        raise UserError(Problem("MASTER_ADDR:MASTER_PORT", f"{host}:{port}", rule, remedy, alone=True)) from error


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
        pause = min(pause * 1.5, 0.5)
    return True


def listed(ranks: Sequence[int | str]) -> str:
    """The first few of many ranks or hosts, in words."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


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
