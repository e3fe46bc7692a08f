"""Lets the ranks of a job find each other, or tells all of them why they cannot.

They meet at a store before any process group exists. Each rank leaves what it is (its host, its GPU, its plan, its
problems). The last one to arrive reads all of that and leaves the verdict: nothing, or the problems that all ranks then
raise alike. So a missing rank is named, a rank without a GPU stops the others at once, and ranks of different plans do
not wait for each other's groups.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import problem_fields
from megalite.launch.environment import ProcessEnvironment

CONNECT_S = 30.0  # for what listens already; torch's client retries for so long, each time with a trace of C++ frames
FOREIGN = "what listens there does not answer as rank 0 of megalite does"
OTHER_PLACE = "another MASTER_PORT, or the MASTER_ADDR of rank 0"


@dataclass(frozen=True)
class RankInfo:
    """What a rank leaves for the others."""

    rank: int
    host: str
    gpu: str | None  # unique id of the device, None on the CPU
    gloo_on_loopback: bool
    plan: Mapping[str, str]  # what must be equal on all ranks, by name, unless at its default; empty beside problems
    problems: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, rank: int, device: torch.device, plan: Mapping[str, str], problems: Sequence[Problem]) -> "RankInfo":
        """Of this process."""
        fields = [*map(problem_fields, problems)]
        return cls(rank, socket.gethostname(), _gpu_id(device), _gloo_on_loopback(), plan, fields)


def rendezvous(
    environment: ProcessEnvironment, info: RankInfo, *, timeout_s: float, store: Store | None = None
) -> Store:
    """Wait until all ranks are there; a store for what follows. Raises one UserError, alike on all ranks.

    They meet at `store`, by default at MASTER_ADDR:MASTER_PORT.
    """
    deadline = time.monotonic() + timeout_s
    store = store or _open_store(environment, deadline)
    try:
        verdict = _attend(store, environment, info, deadline)
    except DistError as error:
        rule = "left before all ranks had arrived"
        raise UserError(Problem("RANK", 0, rule, "look for the last words of rank 0", alone=True)) from error
    if verdict:
        raise UserError(verdict)
    return PrefixStore("groups", store)


def _attend(store: Store, environment: ProcessEnvironment, info: RankInfo, deadline: float) -> list[Problem]:
    """Leave `info`, judge if last, and wait for the verdict."""
    world = range(environment.world_size)

    def judge(problems: Sequence[Problem]) -> None:
        """The first verdict counts."""
        store.compare_set("verdict", "", json.dumps([*map(problem_fields, problems)]))

    store.add("present", 1)
    refusal = _claim_rank(store, environment, info.host)
    if refusal is not None:
        judge([refusal])
    else:
        store.set(f"ranks/{info.rank}", json.dumps(asdict(info)))
        if store.add("arrived", 1) == len(world):
            texts = store.multi_get([f"ranks/{rank}" for rank in world])
            judge(find_problems([RankInfo(**json.loads(text)) for text in texts]))
    if not _await(lambda: store.check(["verdict"]), deadline):
        missing = [rank for rank in world if not store.check([f"ranks/{rank}"])]
        came = f"{len(world) - len(missing)} of {len(world)} ranks arrived within parallel.startup_timeout_s"
        rule, remedy = f"{came}; missing: {listed(missing)}", "look at the logs of the missing ranks, or start fewer"
        judge([Problem("WORLD_SIZE", len(world), rule, remedy, alone=0 in missing)])
    verdict = [Problem(**fields) for fields in json.loads(store.get("verdict"))]
    if refusal and not verdict:  # it comes after the others have been let in
        verdict = [refusal]
    if verdict:
        store.add("readers", 1)
        if environment.rank == 0:  # the store may live in this process: it stays until the others have read, too
            _await(lambda: store.add("readers", 0) >= store.add("present", 0), time.monotonic() + 3)
    return verdict


def _claim_rank(store: Store, environment: ProcessEnvironment, host: str) -> Problem | None:
    """Take the rank's place in the world; what is wrong with it if it cannot be."""
    rank, world_size, me = environment.rank, environment.world_size, f"process {os.getpid()} on {host}"
    told = int(store.compare_set("world_size", "", str(world_size)))
    if told != world_size:
        rule = f"other ranks of this job were told a world of {told}"
        return Problem("WORLD_SIZE", world_size, rule, "start every process with the same WORLD_SIZE")
    claims = store.add(f"claims/{rank}", 1)
    store.set(f"claims/{rank}/{claims}", me)
    if claims > 1:
        first = store.get(f"claims/{rank}/1").decode()  # it has claimed, and says in a moment who it is
        rule = f"{first} and {me} both claim this rank, or belong to two jobs that meet at the same port"
        return Problem("RANK", rank, rule, "give each process its own RANK, and each job its own MASTER_PORT")
    return None


def _await(condition: Callable[[], bool], deadline: float, *, longest_pause: float = 0.5) -> bool:
    """Whether the condition came true in time. Asks often at first, then less: thousands of ranks may be asking."""
    pause = 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, longest_pause)
    return True


def find_problems(infos: Sequence[RankInfo]) -> list[Problem]:
    """Everything that stands against starting, each once."""
    found = [Problem(**fields) for info in infos for fields in info.problems]
    found += _differences({info.rank: info.plan for info in infos if info.plan})
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


def _differences(plans: Mapping[int, Mapping[str, str]]) -> Iterator[Problem]:
    """What the ranks plan differently: they would wait for each other for ever, or train different models."""
    for name in dict.fromkeys(name for plan in plans.values() for name in plan):
        ranks: dict[str, list[int]] = {}
        for rank, plan in plans.items():
            ranks.setdefault(plan.get(name, "default"), []).append(rank)
        if len(ranks) > 1:
            (first, holders), *others = ranks.items()
            shown = ", ".join(f"{text!r} on {_named(who)}" for text, who in others[:4])
            remedy = "start every rank with the same settings, the same files and the same versions"
            yield Problem(name, first, f"so on {_named(holders)}, but {shown}", remedy)


def _open_store(environment: ProcessEnvironment, deadline: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT. Rank 0 opens it, unless torchrun's agent already has."""
    host, port = environment.master_addr, environment.master_port
    serves = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def refused(rule: str, remedy: str) -> UserError:
        """Said by every rank that comes to know it: nobody else may."""
        return UserError(Problem("MASTER_ADDR:MASTER_PORT", f"{host}:{port}", rule, remedy, alone=True))

    try:
        if serves:
            socket.getaddrinfo(host, port)
        elif problem := _await_server(host, port, deadline):
            rule = f"rank {environment.rank} found nobody there within parallel.startup_timeout_s: {problem}"
            remedy = "check that rank 0 runs, that MASTER_ADDR is its host, and that no firewall closes MASTER_PORT"
            raise refused(rule, remedy)
        left = max(1.0, deadline - time.monotonic())
        connecting = timedelta(seconds=min(left, CONNECT_S))
        size = environment.world_size
        store = _in_time(lambda: TCPStore(host, port, size, serves, connecting, wait_for_workers=False), left)
        store.set_timeout(timedelta(seconds=left))
    except TimeoutError as error:
        raise refused(f"{FOREIGN}: no answer in {left:.0f} s", OTHER_PLACE) from error
    except OSError as error:
        raise refused(f"cannot be looked up: {error}", "set MASTER_ADDR to the host of rank 0") from error
    except DistError as error:
        if "EADDRINUSE" in str(error):
            rule = "the port is in use on this host, perhaps by another job"
            raise refused(rule, "another MASTER_PORT; with torchrun --standalone, or --master-port") from error
        raise refused(f"{FOREIGN}: {str(error).splitlines()[0]}", OTHER_PLACE) from error
    # A restart by torchrun must not find what the attempt before has left.
    return PrefixStore(f"megalite/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _in_time(connect: Callable[[], TCPStore], seconds: float) -> TCPStore:
    """What `connect` returns or raises, else TimeoutError: torch waits for a server's first answer without limit."""
    outcome: Future[TCPStore] = Future()

    def attempt() -> None:
        try:
            outcome.set_result(connect())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    return outcome.result(seconds)


def _await_server(host: str, port: int, deadline: float) -> str:
    """Wait until something listens at the port; why it did not, or an empty text. (torch's own client logs C++ traces
    while it retries.)"""
    problem = ""

    def listens() -> bool:
        nonlocal problem
        try:
            socket.create_connection((host, port), timeout=min(5, max(0.1, deadline - time.monotonic()))).close()
            problem = ""
        except OSError as error:
            problem = str(error)
        return not problem

    _await(listens, deadline, longest_pause=0.05)
    return problem


def listed(ranks: Sequence[int]) -> str:
    """The first few of many ranks, in words."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _gpu_id(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _gloo_on_loopback() -> bool:
    """Whether gloo, which binds to the address of the host's own name, would bind where other nodes cannot reach it."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True  # gloo falls back to loopback
