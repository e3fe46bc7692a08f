"""Starts a rank: all ranks meet at a store, agree that they can train together, and make their process groups.

Rank 0 opens a round. Every rank leaves there what it is; rank 0 leaves the verdict: who takes part, and the problems
that all ranks raise alike. A store of torchrun's outlives the ranks, and torchrun gives ranks no number of the restart
that is alike on all nodes. So a verdict counts only for the processes that it names: a rank that finds an old round
joins the next one, too.

All ranks name all groups of the world to torch in the same order (layout/ranks.py), members or not: torch then counts
alike on every rank. NCCL's communicators are formed here (`device_id`), under the time-out of the start. Such a group
sends and receives in the order of all else on it: that is why each direction of the pipeline has a group of its own.
"""

import hashlib
import json
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed exports it, but not to type checkers
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from megalite.errors.problems import Problem, UserError, refuse
from megalite.launch.context import LONGEST_PAUSE_S, ParallelContext, answers, listed, pauses
from megalite.launch.process import LOOPBACK, ProcessEnvironment, is_loopback, keep_freed_memory
from megalite.layout.ranks import GroupNeeds, GroupSpec, all_groups, groups_of

CODE = Path(__file__).parents[1]  # all of megalite
ROUND = "megalite/round"  # the token of the rank 0 that has opened the newest one
AGENT_SERVES = "TORCHELASTIC_USE_AGENT_STORE"  # "True": the store is torchrun's, and outlives the ranks

# Attributes of torch's ProcessGroupNCCL.Options, or of its `config`, by the name of the group.
NcclOptions = Mapping[str, Mapping[str, Any]]


class RankInfo(NamedTuple):
    """What a rank leaves for the others."""

    rank: int
    host: str
    pid: int
    token: str  # of this process
    gpu: str | None  # unique id of the device, None on the CPU
    is_hidden: bool  # other hosts cannot reach the address that gloo binds to
    plan: Mapping[str, str]  # what must be equal on all ranks, by name, unless at its default; empty beside problems
    problems: Sequence[Mapping[str, Any]]


def meet(
    environment: ProcessEnvironment,
    device: torch.device,
    problems: Sequence[Problem],
    plan: Mapping[str, str] | None,
    *,
    timeout_s: float,
    store: Store | None = None,
) -> Store | None:
    """Prepare this process and wait until all ranks are there; the store where they have met, None in a world of one.
    Raises one UserError, alike on all ranks, that holds the problems of all. `plan`: what must be equal on all ranks,
    besides their code, by name; None: nothing must. They meet at `store`, by default at MASTER_ADDR:MASTER_PORT."""
    if environment.threads is not None:
        torch.set_num_threads(environment.threads)
    if device.type == "cpu":
        keep_freed_memory()
    if (size := environment.world_size) == 1:
        refuse(problems)
        return None
    if plan is not None:
        plan = {"WORLD_SIZE": str(size), "torch": torch.__version__, "megalite": code_fingerprint(), **plan}
    host = socket.gethostname()
    try:  # gloo binds to the address of the host's own name
        address = socket.gethostbyname(host)
    except OSError:
        address = LOOPBACK  # gloo falls back to it
    is_hidden = is_loopback(address) and "GLOO_SOCKET_IFNAME" not in os.environ
    process = (environment.rank, host, os.getpid(), uuid.uuid4().hex, gpu_id(device), is_hidden)
    info = RankInfo(*process, {} if problems else plan or {}, [problem.as_json() for problem in problems])
    store = store or _open_store(environment, time.monotonic() + timeout_s)
    try:
        place, found = _attend(store, info, timeout_s) if info.rank else _judge(store, info, size, timeout_s)
    except DistError as error:
        rule = "left before all ranks had arrived"
        raise UserError(Problem("RANK", 0, rule, "look for the last words of rank 0", alone=True)) from error
    refuse(found)
    if environment.local_world_size == size:  # gloo listens where no other host reaches it
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return PrefixStore("groups", place)


def _judge(store: Store, info: RankInfo, size: int, timeout_s: float) -> tuple[Store, list[Problem]]:
    """Open a round on rank 0 and wait for all ranks: the place of the round, and what stands against starting."""
    place = PrefixStore(info.token, store)
    place.set("0", json.dumps(info))
    store.set(ROUND, info.token)
    infos = {rank: RankInfo(*fields) for rank, fields in answers(place, range(size), timeout_s).items()}
    problems = find_problems([*infos.values()])
    if missing := [rank for rank in range(size) if rank not in infos]:
        rule = f"{len(infos)} of {size} ranks arrived within parallel.startup_timeout_s; missing: {listed(missing)}"
        problems.append(Problem("WORLD_SIZE", size, rule, "look at the logs of the missing ranks, or start fewer"))
    verdict = [[each.token for each in infos.values()], [problem.as_json() for problem in problems]]
    place.set("verdict", json.dumps(verdict))
    if problems:
        time.sleep(2 * LONGEST_PAUSE_S)  # the store may live in this process: it stays until the others have read
    return place, problems


def _attend(store: Store, info: RankInfo, timeout_s: float) -> tuple[Store, list[Problem]]:
    """Leave `info` in the newest round, and wait for a verdict that names this process."""
    token, place = "", store
    for _ in pauses(2 * timeout_s):  # rank 0 may have come late, and then waits for others
        if store.check([ROUND]) and (newest := store.get(ROUND).decode()) != token:
            token, place = newest, PrefixStore(newest, store)
            first = RankInfo(*json.loads(place.compare_set(str(info.rank), "", json.dumps(info))))
            if first.token != info.token and os.environ.get(AGENT_SERVES) != "True":  # else it is a dead rank's
                both = " and ".join(f"process {each.pid} on {each.host}" for each in (first, info))
                rule = f"{both} both claim this rank, or belong to two jobs that meet at the same port"
                hint = "give each process its own RANK, and each job its own MASTER_PORT"
                raise UserError(Problem("RANK", info.rank, rule, hint, alone=True))
        if token and place.check(["verdict"]):
            tokens, problems = json.loads(place.get("verdict"))
            if info.token in tokens:
                return place, [Problem(**fields) for fields in problems]
    rule = "did not come within parallel.startup_timeout_s"
    raise UserError(Problem("RANK", 0, rule, "look at the logs of rank 0", alone=True))


def find_problems(infos: Sequence[RankInfo]) -> list[Problem]:
    """Everything that stands against starting, once each."""
    found = [Problem(**fields) for info in infos for fields in info.problems]
    planned, users = [info for info in infos if info.plan], defaultdict[Any, list[int]](list)
    for name in dict.fromkeys(name for info in planned for name in info.plan):
        holders = defaultdict[str, list[RankInfo]](list)
        for info in planned:
            holders[info.plan.get(name, "default")].append(info)
        where = [f"on rank {listed([each.rank for each in who])} ({who[0].host})" for who in holders.values()]
        if len(holders) > 1:
            others = ", ".join(f"{text!r} {place}" for text, place in [*zip(holders, where, strict=True)][1:5])
            hint = "start every rank with the same settings, files and versions"
            found.append(Problem(name, next(iter(holders)), f"so {where[0]}, but {others}", hint))
    for info in infos:
        users[info.host, info.gpu].append(info.rank)
    for (host, gpu), ranks in users.items():
        if gpu is not None and len(ranks) > 1:
            rule = f"ranks {listed(ranks)} of {host} share one GPU"
            found.append(Problem("device", "cuda", rule, "at most one rank per GPU, or device=cpu"))
    several = len({info.host for info in infos}) > 1
    for host in (info.host for info in infos if several and info.is_hidden):
        rule = f"the name of host {host} resolves to its loopback address, which other nodes cannot reach"
        hint = "GLOO_SOCKET_IFNAME=<network interface>, or correct /etc/hosts"
        found.append(Problem("GLOO_SOCKET_IFNAME", None, rule, hint))
    return list(dict.fromkeys(found))


def _open_store(environment: ProcessEnvironment, deadline: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT. Rank 0 opens it, unless torchrun's agent already has. At a loopback address
    it listens there alone; torch's own listening socket is open to every network of the host."""
    host, port, size = environment.master_addr, environment.master_port, environment.world_size
    serves, listening = environment.rank == 0 and os.environ.get(AGENT_SERVES) != "True", None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0] if serves else None
        if family and is_loopback(host):
            listening = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN).detach()
        while not serves:
            try:  # torch's own client logs traces of C++ while nothing listens
                socket.create_connection((host, port), timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        return TCPStore(host, port, size, serves, left, wait_for_workers=False, master_listen_fd=listening)
    except (OSError, UnicodeError, DistError) as error:
        rule = f"rank {environment.rank} found nobody there: {str(error).splitlines()[0]}"
        hint = "check that rank 0 runs, that MASTER_ADDR is its host, and that no firewall closes MASTER_PORT"
        if "ddress already in use" in str(error):
            rule = "the port is in use on this host, perhaps by another job"
            hint = "another MASTER_PORT; with torchrun --standalone, or --master-port"
        # Each rank that comes to know it says so: nobody else may.
        raise UserError(Problem("MASTER_ADDR:MASTER_PORT", f"{host}:{port}", rule, hint, alone=True)) from error


def gpu_id(device: torch.device) -> str | None:
    """Unique among all GPUs; None on the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def code_fingerprint() -> str:
    """A fingerprint of the code: ranks with different code are refused."""
    content = hashlib.sha256()
    for path in sorted(CODE.rglob("*.py")):
        content.update(path.relative_to(CODE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"code with fingerprint {content.hexdigest()[:12]}"


def join(
    place: ParallelContext, *, timeout_s: float, needs: GroupNeeds | None = None, nccl: NcclOptions | None = None
) -> ParallelContext:
    """The context of a rank at this place: make the world, whose ranks have met at its store, and the groups of its
    layout. Until `set_timeout` is called, a rank may take `timeout_s` to join the others. (Where torch's fake backend
    is the world already, one process becomes any rank of any layout.)"""
    layout, rank, device, timeout = place.layout, place.rank, place.device, timedelta(seconds=timeout_s)
    needs = needs or GroupNeeds()
    place = replace(place, specs=groups_of(layout, rank, needs))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch would warn that messages of a group go in one order; the pipeline counts on it.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if layout.world_size == 1:
        return place
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=place.store, rank=rank, world_size=layout.world_size, timeout=timeout)
    groups = make_groups(all_groups(layout, needs), rank, device, timeout, nccl or {})
    return replace(place, groups=groups, control_group=dist.group.WORLD)


def make_groups(
    specs: Iterable[GroupSpec], rank: int, device: torch.device, timeout: timedelta, nccl: NcclOptions
) -> dict[str, dist.ProcessGroup]:
    """The communicators of the groups that `rank` belongs to, by name; all ranks of the world call it. NCCL's
    variables win over its options; groups of different options share no communicator."""
    made, groups = dict[Any, Any](), dict[str, dist.ProcessGroup]()
    for spec in specs:
        on_gpu = device.type == "cuda" and spec.traffic != "saving"
        options: Any = None
        chosen = nccl.get(spec.name, {}) if on_gpu else {}
        key = (spec.traffic, spec.ranks, tuple(sorted(chosen.items())))
        if key not in made:
            if chosen:
                options = dist.ProcessGroupNCCL.Options()  # a new object: `new_group` writes name and members into it
                options._timeout = timeout  # torch warns where it differs from new_group's
            for name, value in chosen.items():
                setattr(options if name == "is_high_priority_stream" else options.config, name, value)
            made[key] = dist.new_group(
                list(spec.ranks),
                timeout=timeout,
                backend="nccl" if on_gpu else dist.get_backend(),
                pg_options=options,
                group_desc=spec.name,
                device_id=device if on_gpu else None,
            )
        if rank in spec.ranks:
            groups[spec.name] = made[key]
    return groups
