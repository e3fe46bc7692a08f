"""Where the time of one step went, read from the trace of it that torch's profiler has made.

Each rank writes two files into the run's profile folder: `step-00000012-rank-00003.json`, its `TimeSplit`, and
`step-00000012-rank-00003.trace.json.gz`, which ui.perfetto.dev opens.

The trace holds the step and its parts as labelled ranges. What its layers wait for each other (tensor parallelism) lies
inside their forward and backward passes; here it is taken out of them and counts as communication. A communication that
goes on beside computing costs nothing and counts nowhere.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.commit import replace_synced
from megalite.train.profile import PART, STEP
from megalite.train.recorder import STEP_PARTS

FOLDER = "profile"  # of a run
COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")  # its operations on a CPU

Intervals = list[tuple[float, float]]  # disjoint, ascending: from when to when, in seconds
Event = Mapping[str, Any]  # in Chrome's format, times in microseconds


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of one step went on one rank, in seconds: on CUDA the device's, on a CPU the training thread's.

    `parts` add up to `wall_s`. `communication` is only what was waited for, not what went on beside computing; `inside`
    is how much of it layers waited for during their forward and backward passes.
    """

    wall_s: float
    parts: dict[str, float]
    inside: dict[str, float]


def write_profile(run_dir: Path, step: int, rank: int, trace: bytes) -> TimeSplit:
    """Write both files. Raises OSError where that fails, ValueError for an incomplete trace."""
    split = time_split(json.loads(trace)["traceEvents"])
    folder, name = run_dir / FOLDER, f"step-{step:08d}-rank-{rank:05d}"
    folder.mkdir(exist_ok=True)
    facts = {"step": step, "rank": rank, **asdict(split)}
    replace_synced(folder / f"{name}.trace.json.gz", gzip.compress(trace, compresslevel=5))
    replace_synced(folder / f"{name}.json", (json.dumps(facts, indent=1) + "\n").encode())
    return split


def time_split(events: Iterable[Event]) -> TimeSplit:
    """What the labels of a step's trace and its communication say. Raises ValueError where there are no labels."""
    spans = [event for event in events if event.get("ph") == "X"]
    on_device = any(event.get("cat") == "kernel" for event in spans)
    whole = [event for event in spans if event["name"] == STEP and event.get("cat") == "user_annotation"]
    if not whole:
        raise ValueError("the trace lacks the label of its step")
    waits = _waits_on_device(spans) if on_device else _waits_on_thread(spans, whole[0].get("tid"))
    category = "gpu_user_annotation" if on_device else "user_annotation"
    parts, inside = dict.fromkeys(STEP_PARTS, 0.0), {"forward": 0.0, "backward": 0.0}
    for part in STEP_PARTS:
        its = _union(event for event in spans if event["name"] == PART + part and event.get("cat") == category)
        waited = _length(_overlap(its, waits))
        parts[part] += _length(its) - waited
        parts["communication"] += waited
        if part in inside:
            inside[part] = waited
    wall = _length(_union(whole))
    parts["other"] = max(0.0, wall - sum(seconds for part, seconds in parts.items() if part != "other"))
    return TimeSplit(wall, {str(part): seconds for part, seconds in parts.items()}, inside)


def format_split(split: TimeSplit) -> str:
    """A line for each part: its seconds, and its share of the step."""
    rows = [*split.parts.items(), *((f"  in {part}", seconds) for part, seconds in split.inside.items())]
    at = 1 + list(split.parts).index("communication")
    rows = [*rows[:at], *rows[len(split.parts) :], *rows[at : len(split.parts)], ("step", split.wall_s)]
    return "\n".join(f"{name:<15}{seconds:>10.4f} s{100 * seconds / split.wall_s:>7.1f} %" for name, seconds in rows)


def _waits_on_thread(spans: Sequence[Event], thread: Any) -> Intervals:
    """When the thread is inside an operation that communicates."""
    return _union(
        event
        for event in spans
        if event.get("tid") == thread and event.get("cat") == "cpu_op" and event["name"].startswith(COMMUNICATION)
    )


def _waits_on_device(spans: Sequence[Event]) -> Intervals:
    """When NCCL's kernels run and nothing else does."""
    kernels = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    nccl = [event for event in kernels if "nccl" in event["name"].lower()]
    return _without(_union(nccl), _union(event for event in kernels if "nccl" not in event["name"].lower()))


def _union(events: Iterable[Event]) -> Intervals:
    """When at least one of the events goes on, in seconds."""
    found: Intervals = []
    for begin, end in sorted((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _overlap(one: Intervals, other: Intervals) -> Intervals:
    """When both go on."""
    found: Intervals = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if begin < end:
            found.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return found


def _without(one: Intervals, other: Intervals) -> Intervals:
    """When the first goes on and the other does not: the first meets the gaps of the other."""
    edges = [-float("inf"), *(edge for interval in other for edge in interval), float("inf")]
    return _overlap(one, list(zip(edges[::2], edges[1::2], strict=True)))


def _length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)
