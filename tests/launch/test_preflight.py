"""A node that is slow, wrong or late is named, and only such a one; the best of too many nodes are chosen."""

import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megalite.launch import preflight as preflight_module
from megalite.launch.context import ParallelContext
from megalite.launch.preflight import best, judge, preflight, table
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
    assert judge(nodes()) == {}
    assert judge(nodes(n2=change)) == {"n2": [told]}
    assert f"n2: {told}" in table(nodes(n2=change))
    assert best(nodes(n2=change), 3) == ["n0", "n1", "n3"]


def test_small_differences_are_no_fault_and_the_slowest_stays_out() -> None:
    uneven = nodes(n0={"matmul, TFLOP/s": 560.0}, n3={"matmul, TFLOP/s": 590.0})
    assert judge(uneven) == {}
    assert best(uneven, 3) == ["n1", "n2", "n3"]


def _measure(context: ParallelContext, folder: Path, bad: int) -> dict[str, Any]:
    """Every rank is a node of its own; one cannot write, and its clock is ahead."""
    os.environ["SLURMD_NODENAME"] = f"n{context.rank}"
    preflight_module.DISK_BYTES = 1 << 20
    if context.rank == bad:
        now = time.time
        time.time = lambda: now() + 100
        folder = Path("/proc/nowhere")
    return dict(preflight(context, folder))


def test_real_ranks_measure_and_agree(tmp_path: Path) -> None:
    first, *others = run_ranks(_measure, 3, tmp_path, 2)
    assert all(other == first for other in others)
    assert [*first] == ["n0", "n1", "n2"]
    assert first["n0"]["transformers"] == metadata.version("transformers")
    speeds = [name for name in preflight_module.LEAST if name != "inside, GB/s"]  # one rank a node
    assert all(first["n0"][name] > 0 for name in speeds)
    faults = judge(first)["n2"]
    assert any(fault.startswith("error: FileNotFoundError") for fault in faults), faults
    assert any(fault.startswith("clock, s: +") for fault in faults), faults
    assert not [*tmp_path.iterdir()]


def test_a_single_process_measures_itself(tmp_path: Path) -> None:
    [(_, figures)] = preflight(ParallelContext(), tmp_path).items()
    assert figures["matmul, TFLOP/s"] > 0
