"""Starting: from an environment to a context, and a clear refusal on all ranks when the ranks cannot meet."""

import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from megalite.config.schema import Config, ParallelConfig
from megalite.config.settings import with_values
from megalite.errors.problems import Problem, UserError, collect
from megalite.launch import context, startup, watchdog
from megalite.launch.context import CPU, ParallelContext
from megalite.launch.environment import ProcessEnvironment
from megalite.launch.startup import RankInfo, find_problems, meet
from megalite.layout.ranks import GroupNeeds
from megalite.train.build import needs_of, open_context
from tests.bad_input.launching import free_port
from tests.ranks import run_ranks


def environment(rank: int, world_size: int, port: int) -> ProcessEnvironment:
    return ProcessEnvironment(rank, world_size, rank, world_size, "127.0.0.1", port, "env")


def cpu_config(timeout_s: float = 20, tp: int = 1) -> Config:
    return Config(device="cpu", precision="fp32", parallel=ParallelConfig(startup_timeout_s=timeout_s, tp=tp))


def _refused(context: ParallelContext, port: int, changes: dict[str, list[Any]]) -> list[tuple[str, str]]:
    """Settings and rules of the refusal that a rank meets who has left its first world."""
    context.close()
    mine = {name: values[context.rank] for name, values in changes.items()}
    place = environment(context.rank, mine.pop("size", context.world_size), port)
    with pytest.raises(UserError) as caught:
        open_context(with_values(cpu_config(timeout_s=mine.pop("timeout_s", 20)), mine), place)
    return [(problem.setting, problem.rule) for problem in caught.value.problems]


MISSING = "2 of 3 ranks arrived within parallel.startup_timeout_s; missing: 2"


@pytest.mark.parametrize(
    ("changes", "settings", "rule"),
    [
        ({"size": [3, 3], "timeout_s": [0.5, 0.5]}, ["WORLD_SIZE"], MISSING),
        ({"size": [2, 3]}, ["WORLD_SIZE"], "so on rank 0 ("),
        ({"device": ["cpu", "cuda"]}, ["device"], ""),
        ({"parallel.tp": [1, 2], "parallel.nccl_options": [8, 9]}, ["parallel.nccl_options", "parallel.tp"], "so on"),
    ],
)
def test_two_ranks_refuse_alike_what_is_wrong_with_one(
    changes: dict[str, list[Any]], settings: list[str], rule: str, tmp_path: Path
) -> None:
    if options := changes.get("parallel.nccl_options"):
        paths = [tmp_path / f"{max_ctas}.yaml" for max_ctas in options]
        for max_ctas, path in zip(options, paths, strict=True):
            path.write_text(f"dp_cp: {{max_ctas: {max_ctas}}}")
        changes = changes | {"parallel.nccl_options": [str(path) for path in paths]}
    first, second = run_ranks(_refused, 2, free_port(), changes)
    assert first == second
    assert [setting for setting, _ in first if setting in settings] == settings
    assert first[0][1].startswith(rule)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b"])
def test_a_master_address_that_does_not_exist_is_said(name: str) -> None:
    with pytest.raises(UserError, match="rank 0 found nobody there"):
        open_context(cpu_config(), replace(environment(0, 2, free_port()), master_addr=name))


def listening(pid: int) -> set[str]:
    """The addresses, in the kernel's hexadecimal words, at which a process waits for connections over TCP."""
    held = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(each)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {row[1] for row in rows[1:] if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def _where_a_rank_listens(context: ParallelContext, port: int, address: str) -> set[str]:
    context.close()
    before = listening(os.getpid())
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    started = open_context(cpu_config(), replace(environment(context.rank, 2, port), master_addr=address))
    dist.all_reduce(torch.tensor(1.0), group=started.group("dp-cp"))
    found = listening(os.getpid()) - before
    started.barrier()
    started.close()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "else gloo takes the address of the host's name"
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_ranks_that_meet_at_the_loopback_listen_nowhere_else(address: str) -> None:
    """To no port of the machine may a stranger speak: neither to rank 0's store nor to gloo's listeners."""
    port = free_port()
    first, second = run_ranks(_where_a_rank_listens, 2, port, address)
    loopback = re.compile(r"[0-9A-F]{6}7F:[0-9A-F]{4}|0{24}01000000:[0-9A-F]{4}")  # 127.x.x.x, ::1
    assert any(place.endswith(f":{port:04X}") for place in first), "the store is seen"
    assert len(first) > len(second) > 0, "so is gloo"
    assert [place for place in first | second if not loopback.fullmatch(place)] == []


def _rank_1_is_late(context: ParallelContext, port: int, late_s: float, set_s: float | None) -> str:
    """What an all-reduce says whose time is up after `set_s`, or 1 s of start-up and 2 s of the watchdog's report."""
    context.close()
    watchdog.REPORT_S = 1.0
    started, error = open_context(cpu_config(timeout_s=1), environment(context.rank, 2, port)), ""
    if set_s is not None:
        started.set_timeout(set_s)
    started.barrier()
    time.sleep(late_s if context.rank else 0.0)
    try:
        dist.all_reduce(torch.ones(1), group=started.group("dp-cp"))
    except RuntimeError as caught:
        error = str(caught)
    started.close()
    return error


@pytest.mark.parametrize(("late_s", "set_s", "fails"), [(1.5, None, False), (5.0, None, True), (2.5, 1.0, True)])
def test_the_start_up_time_bounds_collectives_until_another_time_is_set(
    late_s: float, set_s: float | None, fails: bool
) -> None:
    """The watchdog, whose time it is, has the first word."""
    assert ("imed out" in run_ranks(_rank_1_is_late, 2, free_port(), late_s, set_s)[0]) == fails


def test_the_groups_follow_the_settings() -> None:
    changes: dict[str, Any] = {"optimizer.instances": 4, "checkpoint.async": True, "model.num_key_value_heads": 2}
    asked = with_values(Config(), changes | {"model.tie_embeddings": False})
    assert needs_of(asked) == GroupNeeds(False, kv_heads=2, optimizer_instances=4, background_saving=True)
    assert needs_of(Config()) == GroupNeeds(True)
    assert needs_of(with_values(asked, {"optimizer.zero": 0})).optimizer_instances == 1


def test_types_are_judged_by_the_precision_that_the_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_values(Config(device="cpu"), {"optimizer.gradient_dtype": "bf16"})
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert open_context(asked, ProcessEnvironment()).dtype == torch.bfloat16
    for instructions in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{instructions}_supported", lambda: False)
    with pytest.raises(UserError, match=r"optimizer\.gradient_dtype='bf16'.*precision=auto, which is fp32 here"):
        open_context(asked, ProcessEnvironment())


def _attempt(store: Store, ranks: Sequence[int], size: int = 2, timeout_s: float = 20) -> list[list[Problem]]:
    """What ranks get that come one after the other, each as a process of its own."""

    def come(rank: int) -> list[Problem]:
        problems: list[Problem] = []
        collect(lambda: meet(environment(rank, size, 1), CPU, [], {}, timeout_s=timeout_s, store=store), problems)
        return problems

    with ThreadPoolExecutor() as threads:
        coming = []
        for rank in ranks:
            coming.append(threads.submit(come, rank))
            time.sleep(0.1)
        return [future.result() for future in coming]


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return HashStore()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
@pytest.mark.parametrize(("ranks", "size"), [([0, 1], 2), ([0], 2), ([1], 2), ([0, 2, 1], 3), ([0, 1], 3)], ids=str)
def test_a_restart_takes_nothing_for_its_own_of_what_dead_ranks_left_in_torchrun_s_store(
    ranks: list[int], size: int, order: list[int], agent_store: HashStore
) -> None:
    _attempt(agent_store, ranks, size, timeout_s=0.5)
    assert _attempt(agent_store, order) == [[], []]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_restart_does_not_count_on_a_rank_that_died_before_all_had_come(
    dead: int, agent_store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for module in (context, startup):
            patch.setattr(module, "pauses", interrupt)
        with pytest.raises(KeyboardInterrupt):
            meet(environment(dead, 2, 1), CPU, [], {}, timeout_s=20, store=agent_store)
    assert _attempt(agent_store, [1, 0]) == [[], []]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def info(
    rank: int, host: str = "a", gpu: str | None = None, loopback: bool = False, plan: dict[str, str] | None = None
) -> RankInfo:
    return RankInfo(rank, host, 1, "", gpu, loopback, plan or {}, [])


EQUAL, OTHER = {"layout": "tp=2"}, {"layout": "tp=2", "parallel.nccl_options": "{'tp': {}}"}


@pytest.mark.parametrize(
    ("infos", "setting", "rule"),
    [
        ([info(0, gpu="x"), info(1, gpu="y"), info(2, host="b", gpu="x")], None, ""),
        ([info(0, gpu="x"), info(1, gpu="x")], "device", "ranks 0, 1 of a share one GPU"),
        ([info(0, plan=EQUAL), info(1, plan=EQUAL), info(2)], None, ""),
        (
            [info(0, plan=EQUAL), info(1, host="b", plan=OTHER), info(2, plan=EQUAL)],
            "parallel.nccl_options",
            "so on rank 0, 2 (a), but \"{'tp': {}}\" on rank 1 (b)",
        ),
        ([info(0, loopback=True), info(1, loopback=True)], None, ""),
        ([info(0), info(1, host="b", loopback=True)], "GLOO_SOCKET_IFNAME", "the name of host b resolves to"),
    ],
)
def test_what_stands_between_ranks_is_found(infos: list[RankInfo], setting: str | None, rule: str) -> None:
    problems = find_problems(infos)
    assert [problem.setting for problem in problems] == ([setting] if setting else [])
    assert all(rule in problem.rule for problem in problems)
