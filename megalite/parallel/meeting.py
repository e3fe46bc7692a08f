"""The ranks of a job find each other, or everyone learns why not.

They meet at a TCPStore before any process group exists: each leaves a card (its host, its GPU, its problems), the last
to arrive reads all cards and leaves the verdict, an empty list or the problems that all ranks then raise alike. So a
missing rank is named, and a rank without a GPU stops the others at once instead of leaving them to wait.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from megalite.config.problems import Problem, UserError
from megalite.parallel.context import problem_fields
from megalite.parallel.environment import ProcessEnvironment


@dataclass(frozen=True)
class Card:
    """What a rank leaves at the meeting place."""

    rank: int
    host: str
    gpu: str | None  # unique id of the device, None on the CPU
    gloo_on_loopback: bool
    problems: list[dict[str, Any]]


def meet(environment: ProcessEnvironment, device: torch.device, problems: list[Problem], *, timeout_s: float) -> Store:
    """Wait until all ranks are there; the store they met at. Raises one UserError, alike on all ranks."""
    deadline = time.monotonic() + timeout_s
    store = _open_store(environment, deadline)
    card = Card(environment.rank, socket.gethostname(), _gpu_id(device), _gloo_on_loopback(), _plain(problems))
    try:
        verdict = _attend(store, environment, card, deadline)
    except DistError as error:
        rule = "rank 0 left before all ranks had arrived"
        raise UserError(_at_master(environment, rule, "read the message of rank 0")) from error
    if verdict:
        raise UserError(verdict)
    return PrefixStore("groups", store)


def _attend(store: Store, environment: ProcessEnvironment, card: Card, deadline: float) -> list[Problem]:
    """Leave the card, judge if last, and wait for the verdict: what stands against starting."""
    store.add("present", 1)
    refusal = _claim(store, environment, card.host)
    if refusal is not None:
        store.set("verdict", _to_json([refusal]))
    else:
        store.set(f"cards/{card.rank}", json.dumps(asdict(card)))
        if store.add("arrived", 1) == environment.world_size:
            cards = store.multi_get([f"cards/{rank}" for rank in range(environment.world_size)])
            store.set("verdict", _to_json(judge([Card(**json.loads(text)) for text in cards])))
    if not _await(lambda: store.check(["verdict"]), deadline):
        store.compare_set("verdict", "", _to_json([_missing_peers(store, environment)]))
    verdict = [Problem(**fields) for fields in json.loads(store.get("verdict"))]
    if verdict:
        store.add("readers", 1)
        if environment.rank == 0:  # the store may live in this process: it stays until the others have read, too
            _await(lambda: store.add("readers", 0) >= store.add("present", 0), time.monotonic() + 3)
    return verdict


def _claim(store: Store, environment: ProcessEnvironment, host: str) -> Problem | None:
    """Take the rank's place in the world; what is wrong with it if it cannot be."""
    rank, world_size = environment.rank, environment.world_size
    told = int(store.compare_set("world_size", "", str(world_size)))
    if told != world_size:
        rule = f"other ranks of this job were told a world of {told}"
        return Problem("WORLD_SIZE", world_size, rule, "start every process with the same WORLD_SIZE")
    if store.add(f"claims/{rank}", 1) > 1:
        rule = f"two processes claim this rank (one on {host}), or another job meets at the same port"
        return Problem("RANK", rank, rule, "give each process its own RANK, and each job its own MASTER_PORT")
    return None


def _await(condition: Callable[[], bool], deadline: float) -> bool:
    """Whether the condition came true in time. Asks often at first, then less: thousands of ranks may be asking."""
    pause = 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    return True


def judge(cards: list[Card]) -> list[Problem]:
    """Everything that stands against starting, from the cards of all ranks."""
    found = dict.fromkeys(Problem(**fields) for card in cards for fields in card.problems)
    users: dict[tuple[str, str], list[int]] = {}
    for card in cards:
        if card.gpu is not None:
            users.setdefault((card.host, card.gpu), []).append(card.rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            rule = f"ranks {listed(ranks)} of {host} share one GPU"
            found[Problem("device", "cuda", rule, "at most one rank per GPU, or device=cpu")] = None
    if len({card.host for card in cards}) > 1:
        for card in cards:
            if card.gloo_on_loopback:
                rule = f"the name of host {card.host} resolves to its loopback address, which other nodes cannot reach"
                remedy = "GLOO_SOCKET_IFNAME=<network interface>, or correct /etc/hosts"
                found[Problem("GLOO_SOCKET_IFNAME", None, rule, remedy)] = None
    return list(found)


def _open_store(environment: ProcessEnvironment, deadline: float) -> Store:
    """The meeting place at MASTER_ADDR:MASTER_PORT. Rank 0 opens it, unless torchrun's agent already has."""
    host, port = str(environment.master_addr), int(environment.master_port)
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = environment.rank == 0 and not served_by_agent
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        if serves:
            socket.getaddrinfo(host, port)
        else:
            _await_server(environment, deadline)
        store = TCPStore(host, port, environment.world_size, serves, left, wait_for_workers=False)
    except OSError as error:
        rule, remedy = f"cannot be looked up: {error}", "set MASTER_ADDR to the host of rank 0"
        raise UserError(_at_master(environment, rule, remedy)) from error
    except DistError as error:
        if "EADDRINUSE" in str(error):
            rule = "the port is in use on this host, perhaps by another job"
            remedy = "another MASTER_PORT; with torchrun --standalone, or --master-port"
        else:
            rule, remedy = f"no meeting there: {str(error).splitlines()[0]}", "another MASTER_ADDR or MASTER_PORT"
        raise UserError(_at_master(environment, rule, remedy)) from error
    # A restart by torchrun must not meet the cards of the attempt before.
    return PrefixStore(f"megalite/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_server(environment: ProcessEnvironment, deadline: float) -> None:
    """Return once something listens at the master's port. (torch's own client logs C++ traces while it retries.)"""
    last: OSError | None = None
    while time.monotonic() < deadline:
        try:
            socket.create_connection((environment.master_addr, environment.master_port), timeout=5).close()
            return
        except OSError as error:
            last = error
            time.sleep(0.05)
    rule = f"rank {environment.rank} found nobody there within parallel.startup_timeout_s: {last}"
    remedy = "check that rank 0 runs, that MASTER_ADDR is its host, and that no firewall closes MASTER_PORT"
    raise UserError(_at_master(environment, rule, remedy))


def _missing_peers(store: Store, environment: ProcessEnvironment) -> Problem:
    world_size = environment.world_size
    missing = [rank for rank in range(world_size) if not store.check([f"cards/{rank}"])]
    came = world_size - len(missing)
    rule = f"{came} of {world_size} ranks arrived within parallel.startup_timeout_s; missing: {listed(missing)}"
    return Problem("WORLD_SIZE", world_size, rule, "look at the logs of the missing ranks, or start fewer")


def _at_master(environment: ProcessEnvironment, rule: str, remedy: str) -> Problem:
    return Problem("MASTER_ADDR:MASTER_PORT", f"{environment.master_addr}:{environment.master_port}", rule, remedy)


def listed(ranks: list[int]) -> str:
    """The first few of many ranks, in words."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _to_json(problems: list[Problem]) -> str:
    return json.dumps(_plain(problems))


def _plain(problems: list[Problem]) -> list[dict[str, Any]]:
    return [problem_fields(problem) for problem in problems]


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
