"""Where a step's time went is read from its trace: parts add up, and what was waited for is communication."""

from typing import Any

import pytest

from megalite.train.history import STEP_PARTS
from megalite.train.profile import time_split

MS = 1000.0  # microseconds


def span(name: str, begin: float, end: float, category: str = "user_annotation", thread: int = 1) -> dict[str, Any]:
    """An event from `begin` to `end`, in milliseconds."""
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": begin * MS, "dur": (end - begin) * MS}


STEP = [
    span("train step", 0, 100),
    span("part: other", 0, 5),
    span("part: data", 5, 10),
    span("part: forward", 10, 30),
    span("part: backward", 30, 70),
    span("part: communication", 70, 80),
    span("part: optimizer", 80, 98),
]


def milliseconds(parts: dict[str, float]) -> dict[str, float]:
    return {part: round(1000 * seconds, 6) for part, seconds in parts.items()}


CPU = [
    span("_c10d_functional::all_reduce", 12, 14, "cpu_op"),
    span("c10d::allreduce_", 12.5, 13.5, "cpu_op"),  # inside it
    span("_c10d_functional::wait_tensor", 28, 31, "cpu_op"),  # one millisecond of it in backward
    span("c10d::allreduce_", 71, 79, "cpu_op"),  # where it counts already
    span("aten::mm", 14, 20, "cpu_op"),
    span("gloo:all_reduce", 40, 60, "cpu_op", thread=2),  # beside computing
    {"ph": "M", "name": "process_name"},
]
DEVICE = [
    *(
        span(it["name"], it["ts"] / MS + 2, (it["ts"] + it["dur"]) / MS + 2, "gpu_user_annotation", 7)
        for it in STEP[1:]
    ),
    span("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 15, 20, "kernel", 8),
    span("gemm", 12, 18, "kernel", 7),  # of the five only two are waited for
    span("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 40, 45, "kernel", 8),
    span("Memcpy DtoD", 44, 46, "gpu_memcpy", 7),
    span("c10d::allreduce_", 12, 14, "cpu_op"),  # its host does not wait
]


@pytest.mark.parametrize(
    ("events", "parts", "inside"),
    [(CPU, (5, 16, 39, 0, 15, 18, 7), (4, 1)), (DEVICE, (5, 18, 36, 0, 16, 18, 7), (2, 4))],
    ids=["cpu", "cuda"],
)
def test_what_communicates_and_is_waited_for_is_communication(
    events: list[dict[str, Any]], parts: tuple[int, ...], inside: tuple[int, int]
) -> None:
    """On a CPU an operation is waited for, on a device a kernel that nothing else runs beside. A device's parts are
    its own: it runs behind the host."""
    split = time_split([*STEP, *events])
    assert split["wall_s"] == pytest.approx(0.1)
    assert milliseconds(split["parts"]) == dict(zip(STEP_PARTS, parts, strict=True))
    assert milliseconds(split["inside"]) == {"forward": inside[0], "backward": inside[1]}


def test_a_trace_without_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="label"):
        time_split([span("aten::mm", 0, 1, "cpu_op")])
