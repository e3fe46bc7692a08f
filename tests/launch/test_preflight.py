"""A node that is slow, wrong or late is named, and only such a one; the best of too many nodes are chosen."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.errors.problems import UserError
from megalite.launch import preflight as preflight_module
from megalite.launch import startup
from megalite.launch.context import CPU, ParallelContext
from megalite.launch.preflight import best, judge, preflight, seconds, table
from megalite.launch.process import ProcessEnvironment
from megalite.launch.startup import meet
from tests.bad_input.launching import free_port
from tests.ranks import run_ranks

WELL = {"torch": "2.13.0", "device": "H100", "matmul, TFLOP/s": 600.0, "memory, GB/s": 2000.0, "disk, MB/s": 900.0}
WELL |= {"inside, GB/s": 200.0, "across, GB/s": 40.0, "clock, s": 1000.0}


def nodes(**changes: dict[str, float | str]) -> dict[str, Any]:
    return {name: WELL | changes.get(name, {}) for name in ("n0", "n1", "n2", "n3")}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"matmul, TFLOP/s": 470.0}, "matmul, TFLOP/s: 470, the median is 600"),
        ({"across, GB/s": 15.0}, "across, GB/s: 15, the median is 40"),
        ({"clock, s": 1030.0}, "clock, s: +30.0"),
        ({"torch": "2.12.0"}, "torch: 2.12.0"),
        ({"device": "cpu"}, "device: cpu"),
        ({"error": "RuntimeError: CUDA error"}, "error: RuntimeError: CUDA error"),
    ],
)
def test_what_differs_from_the_others_is_named(change: dict[str, float | str], told: str) -> None:
    assert judge(nodes()) == ({}, [])
    assert judge(nodes(n2=change)) == ({"n2": [told]}, [])
    assert f"n2: {told}" in table(nodes(n2=change))
    assert best(nodes(n2=change), 3) == ["n0", "n1", "n3"]


@pytest.mark.parametrize("change", [{"torch": "2.12.0"}, {"clock, s": 1030.0}])
def test_where_half_of_the_nodes_differ_from_the_others_none_is_blamed(change: dict[str, float | str]) -> None:
    split = nodes(n2=change, n3=change)
    two = {name: split[name] for name in ("n1", "n2")}
    shown = {"torch": "2.13.0 on n1, 2.12.0 on n2", "clock, s": "-15.0 on n1, +15.0 on n2"}
    (name,) = change
    assert judge(two) == ({}, [f"they differ in {name}: {shown[name]}"])
    faults, [line] = judge(split)
    assert (faults, line in table(split)) == ({}, True)
    assert best(two, 1) == ["n1"]


def test_of_a_dead_link_the_end_that_has_no_other_is_wrong() -> None:
    silent = "TimeoutError: no answer within 30 s"
    dead = nodes(n0={"link to n1": silent}, n1={"link to n0": silent, "link to n2": silent, "across, GB/s": 0.0})
    dead["n2"] |= {"link to n1": silent}
    faults = ["across, GB/s: 0, the median is 40", f"link to n0: {silent}", f"link to n2: {silent}"]
    assert {node: sorted(found) for node, found in judge(dead)[0].items()} == {"n1": faults}
    cut = nodes(n0={"link to n1": silent}, n1={"link to n0": silent})
    assert judge(cut)[0] == {"n0": [f"link to n1: {silent}"], "n1": [f"link to n0: {silent}"]}


def test_a_device_that_throttles_after_a_moment_is_slow() -> None:
    begun = time.perf_counter()

    def multiply() -> None:
        time.sleep(0.001 if time.perf_counter() - begun < 0.02 else 0.02)

    assert seconds(multiply, CPU, 0.6) > 0.015


# What is wrong with a rank or its node: it changes this process, or what the rank tells of itself.


def clock_ahead(context: ParallelContext) -> ParallelContext:
    now = time.time
    time.time = lambda: now() + 100
    return context


def other_device(context: ParallelContext) -> ParallelContext:
    return replace(context, device=torch.device("meta"))


def disk_hangs(context: ParallelContext) -> ParallelContext:
    Path.is_dir = preflight_module.write = lambda *_: time.sleep(3600)  # type: ignore[assignment,method-assign]
    return context


def disk_is_not_mounted(context: ParallelContext) -> ParallelContext:
    write = preflight_module.write
    preflight_module.write = lambda folder, content: write(folder / "runs", content)
    return context


def stops_in_measuring(context: ParallelContext) -> ParallelContext:
    preflight_module._Rank.measure = lambda *_: time.sleep(12)  # type: ignore[method-assign]
    return context


def stops_before_links(context: ParallelContext) -> ParallelContext:
    preflight_module._Rank.measure_links = lambda *_: time.sleep(12)  # type: ignore[method-assign]
    return context


Fault = Callable[[ParallelContext], ParallelContext]


def _measure(context: ParallelContext, folder: Path, faults: dict[int, Fault], wait_s: float = 60) -> dict[str, Any]:
    """Every rank is a node of its own, measured for a moment only."""
    os.environ["SLURMD_NODENAME"] = f"n{context.rank}"
    preflight_module.DISK_BYTES, preflight_module.MEASURE_S, preflight_module.WAIT_S = 1 << 20, 0.1, wait_s
    preflight_module.LINK_S, preflight_module.HANG_S = 2.0, 15.0 if stops_in_measuring in faults.values() else 3.0
    fault = faults.get(context.rank, lambda it: it)
    return dict(preflight(fault(context), folder))


def test_real_ranks_measure_and_the_first_one_knows(tmp_path: Path) -> None:
    """A disk that hangs or is missing, a clock that is wrong."""
    faults = {0: disk_hangs, 1: disk_is_not_mounted, 2: clock_ahead}
    first, *others = run_ranks(_measure, 3, tmp_path / "no run" / "yet", faults)
    assert others == [{}, {}]
    assert [*first] == ["n0", "n1", "n2"]
    assert all(first[node]["across, GB/s"] > 0 for node in first)
    assert all(first["n2"][name] > 0 for name in ("matmul, TFLOP/s", "memory, GB/s", "disk, MB/s"))
    assert first["n0"]["error"] == "TimeoutError: no answer in time"
    assert first["n1"]["error"].startswith("FileNotFoundError")
    assert first["n1"]["torch"] == torch.__version__
    assert any(fault.startswith("clock, s: +") for fault in judge(first)[0]["n2"])
    assert not [*tmp_path.iterdir()]


def test_a_node_with_another_device_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    found = run_ranks(_measure, 3, tmp_path, {1: other_device})[0]
    assert "device: meta" in judge(found)[0]["n1"]
    assert not [name for measures in found.values() for name in measures if name.startswith(("link", "across"))]


# One rank of the command. With MEGALITE_DEAD its links hang; gloo waits there until its store goes, while Python ends.
COMMAND = """
import os, sys, time
from datetime import timedelta
from megalite.commands.preflight import main
from megalite.launch import preflight
preflight.LINK_S, preflight.MEASURE_S, preflight.DISK_BYTES = 3.0, 0.1, 1 << 20
Gloo = preflight.ProcessGroupGloo
preflight.ProcessGroupGloo = lambda *place: Gloo(*place[:3], timedelta(seconds=60))
if "MEGALITE_DEAD" in os.environ:
    preflight._Rank.all_reduce = lambda *_: time.sleep(3600)
main(["--device", "cpu", *sys.argv[1:]])
"""


def test_a_link_that_hangs_does_not_change_the_exit_status(tmp_path: Path) -> None:
    ranks = []
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, "-c", COMMAND, "--folder", str(tmp_path), "--keep", "1"]
    for rank, dead in enumerate(({}, {"MEGALITE_DEAD": "yes"})):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "SLURMD_NODENAME": f"n{rank}", "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen(words, env={**place, **own, **dead}, stdout=-1, stderr=-1, text=True))
    (chosen, said), _ = [each.communicate(timeout=60) for each in ranks]
    assert "n0: link to n1: TimeoutError: no answer in time" in said
    assert [each.returncode for each in ranks] == [1, 0], said
    assert chosen in ("n0\n", "n1\n")


@pytest.mark.parametrize("fault", [stops_in_measuring, stops_before_links])
def test_the_node_of_a_rank_that_stops_is_named_and_the_others_go_on(tmp_path: Path, fault: Fault) -> None:
    found = run_ranks(_measure, 3, tmp_path, {1: fault}, 4.0)[0]
    assert found["n1"] == {"error": "no answer within 4 s"}
    assert [measures.get("across, GB/s", 0) > 0 for measures in found.values()] == [True, False, True]
    assert best(found, 2) == ["n0", "n2"]
    assert not [node for node, faults in judge(found)[0].items() if any("link to" in fault for fault in faults)]


def _one_dies(context: ParallelContext, folder: Path) -> str:
    preflight_module.WAIT_S = 3
    if context.rank == 1:
        return ""
    with pytest.raises(UserError) as caught:
        preflight(context, folder)
    return caught.value.problems[0].rule


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    assert run_ranks(_one_dies, 2, tmp_path)[0] == "no answer within 3 s from rank 1"


def _odd_nodes(context: ParallelContext, folder: Path, port: int) -> tuple[dict[str, Any], str]:
    """Two nodes with different code, the second with a GPU too few: what the preflight says, and what training does."""
    context.close()
    os.environ["SLURMD_NODENAME"] = f"n{context.rank // 2}"
    preflight_module.DISK_BYTES, preflight_module.MEASURE_S = 1 << 20, 0.1
    startup.code_fingerprint = preflight_module.code_fingerprint = lambda: f"code {context.rank // 2}"
    preflight_module.gpu_id = lambda _: f"GPU-{context.rank % 2 if context.rank < 2 else 0}"
    place = ProcessEnvironment(context.rank, 4, 0, 1, "127.0.0.1", port, "env")
    store = meet(place, CPU, [], None, timeout_s=20)
    found = dict(preflight(ParallelContext(context.layout, context.rank, store=store), folder))
    with pytest.raises(UserError) as caught:
        meet(place, CPU, [], {}, timeout_s=20, store=context.store)
    time.sleep(0 if context.rank else 3)  # the store lives in rank 0
    return found, caught.value.problems[0].rule


def test_odd_nodes_are_named_by_the_preflight_and_refused_by_a_training(tmp_path: Path) -> None:
    [(found, rule), *_] = run_ranks(_odd_nodes, 4, tmp_path, free_port())
    faults, differences = judge(found)
    blamed = {node: [fault for fault in found if "error" in fault] for node, found in faults.items()}
    assert blamed.pop("n1") == ["error: ranks 2, 3 share one GPU"]
    assert not any(blamed.values())
    assert differences == ["they differ in megalite: code 0 on n0, code 1 on n1"]
    assert rule.startswith("so on rank 0, 1 (")
    assert "but 'code 1' on rank 2, 3 (" in rule
