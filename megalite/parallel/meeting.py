"""The ranks of a job find each other, or everyone learns why not.

They meet at a TCPStore before any process group exists: each leaves a card (its host, its GPU, its plan, its problems),
the last to arrive reads all cards and leaves the verdict, an empty list or the problems that all ranks then raise
alike. So a missing rank is named, a rank without a GPU stops the others at once instead of leaving them to wait, and
ranks of different plans do not wait for each other's groups. The ranks of a world that exists meet in its store.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from megalite.config.problems import Problem, UserError
from megalite.parallel.context import problem_fields
from megalite.parallel.environment import ProcessEnvironment

CONNECT_S = 30.0  # for what listens already; torch's client retries for so long, each time with a trace of C++ frames
FOREIGN = "what listens there does not answer as rank 0 of megalite does"
OTHER_PLACE = "another MASTER_PORT, or the MASTER_ADDR of rank 0"


@dataclass(frozen=True)
class Card:
    """What a rank leaves at the meeting place."""

    rank: int
    host: str
    gpu: str | None  # unique id of the device, None on the CPU
    gloo_on_loopback: bool
    plan: Mapping[str, str]  # what must be equal on all ranks, by name, unless at its default; empty beside problems
    problems: list[dict[str, Any]]

    @classmethod
    def written(cls, rank: int, device: torch.device, plan: Mapping[str, str], problems: list[Problem]) -> "Card":
        """The card of this process."""
        return cls(rank, socket.gethostname(), _gpu_id(device), _gloo_on_loopback(), plan, _plain(problems))


def meet(environment: ProcessEnvironment, card: Card, *, timeout_s: float) -> Store:
    """Wait until all ranks are there; the store they met at. Raises one UserError, alike on all ranks."""
    deadline = time.monotonic() + timeout_s
    store = _open_store(environment, deadline)
    _agree(store, environment, card, deadline)
    return PrefixStore("groups", store)


def meet_in_world(environment: ProcessEnvironment, card: Card, *, timeout_s: float) -> None:
    """The same for the ranks of torch's default process group, whatever its backend. All of them must call it.

    They count by that group, not by `environment`.
    """
    place = replace(environment, rank=dist.get_rank(), world_size=dist.get_world_size())
    store = PrefixStore("megalite", _get_default_store())
    times = store.add(f"meetings/{place.rank}", 1)  # no meeting finds the cards of the one before
    card = replace(card, rank=place.rank)
    _agree(PrefixStore(str(times), store), place, card, time.monotonic() + timeout_s)


def _agree(store: Store, environment: ProcessEnvironment, card: Card, deadline: float) -> None:
    try:
        verdict = _attend(store, environment, card, deadline)
    except DistError as error:
        rule = "left before all ranks had arrived"
        raise UserError(Problem("RANK", 0, rule, "look for the last words of rank 0", alone=True)) from error
    if verdict:
        raise UserError(verdict)


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
    found |= dict.fromkeys(_differences(cards))
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


def _differences(cards: list[Card]) -> Iterator[Problem]:
    """What the ranks plan differently: they would wait for each other for ever, or train different models."""
    plans = {card.rank: card.plan for card in cards if card.plan}
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
    """The meeting place at MASTER_ADDR:MASTER_PORT. Rank 0 opens it, unless torchrun's agent already has."""
    host, port = str(environment.master_addr), int(environment.master_port)
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = environment.rank == 0 and not served_by_agent
    try:
        if serves:
            socket.getaddrinfo(host, port)
        else:
            _await_server(environment, deadline)
        left = max(1.0, deadline - time.monotonic())
        connecting = timedelta(seconds=min(left, CONNECT_S))
        size = environment.world_size
        store = _in_time(lambda: TCPStore(host, port, size, serves, connecting, wait_for_workers=False), left)
        if store is None:
            raise UserError(_at_master(environment, f"{FOREIGN}: no answer in {left:.0f} s", OTHER_PLACE))
        store.set_timeout(timedelta(seconds=left))
    except OSError as error:
        rule, remedy = f"cannot be looked up: {error}", "set MASTER_ADDR to the host of rank 0"
        raise UserError(_at_master(environment, rule, remedy)) from error
    except DistError as error:
        if "EADDRINUSE" in str(error):
            rule = "the port is in use on this host, perhaps by another job"
            remedy = "another MASTER_PORT; with torchrun --standalone, or --master-port"
        else:
            rule, remedy = f"{FOREIGN}: {str(error).splitlines()[0]}", OTHER_PLACE
        raise UserError(_at_master(environment, rule, remedy)) from error
    # A restart by torchrun must not meet the cards of the attempt before.
    return PrefixStore(f"megalite/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _in_time(connect: Callable[[], TCPStore], seconds: float) -> TCPStore | None:
    """The store, or None: torch waits for a server's first answer without limit. Raises what `connect` raises."""
    outcome: list[TCPStore | Exception] = []

    def attempt() -> None:
        try:
            outcome.append(connect())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    match outcome:
        case [Exception() as error]:
            raise error
        case [TCPStore() as store]:
            return store
    return None


def _await_server(environment: ProcessEnvironment, deadline: float) -> None:
    """Return once something listens at the master's port. (torch's own client logs C++ traces while it retries.)"""
    last: OSError | None = None
    while time.monotonic() < deadline:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((environment.master_addr, environment.master_port), timeout=min(5, left)).close()
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
    remedy = "look at the logs of the missing ranks, or start fewer"
    return Problem("WORLD_SIZE", world_size, rule, remedy, alone=0 in missing)


def _at_master(environment: ProcessEnvironment, rule: str, remedy: str) -> Problem:
    """Said by every rank that comes to know it: nobody else may."""
    place = f"{environment.master_addr}:{environment.master_port}"
    return Problem("MASTER_ADDR:MASTER_PORT", place, rule, remedy, alone=True)


def listed(ranks: list[int]) -> str:
    """The first few of many ranks, in words."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


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
