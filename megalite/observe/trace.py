"""Where the time of one step went, read from the trace of it that torch's profiler has made.

Each rank writes two files into the run's profile folder: `step-00000012-rank-00003.json`, the time split, and
`step-00000012-rank-00003.trace.json.gz`, which ui.perfetto.dev opens.

The trace holds the step and its parts as labelled ranges. What its layers wait for each other (tensor parallelism) lies
inside their forward and backward passes; here it is taken out of them and counts as communication. A communication that
goes on beside computing costs nothing and counts nowhere.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megalite.config.durable_files import write_atomically
from megalite.train.clock import PART, STEP
from megalite.train.recorder import STEP_PARTS

FOLDER = "profile"  # of a run
COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")  # its operations on a CPU
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]  # from when to when, in microseconds


def write_profile(folder: Path, step: int, rank: int, trace: bytes) -> dict[str, Any]:
    """Write both files; the time split. Raises OSError where that fails, ValueError for an incomplete trace."""
    split = time_split(json.loads(trace)["traceEvents"])
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}-rank-{rank:05d}.json"
    write_atomically(path.with_suffix(".trace.json.gz"), gzip.compress(trace, compresslevel=5))
    write_atomically(path, (json.dumps({"step": step, "rank": rank, **split}, indent=1) + "\n").encode())
    return split


def time_split(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Where the time of a step went, in seconds: on CUDA the device's, on a CPU the training thread's.

    `parts` add up to `wall_s`. `communication` is only what was waited for, not what went on beside computing; `inside`
    is how much of it layers waited for during their forward and backward passes. `events` are in Chrome's format.
    Raises ValueError where they lack the labels of a step.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    label = [event for event in spans if event["name"] == STEP and event.get("cat") == "user_annotation"]
    if not label:
        raise ValueError("the trace lacks the label of its step")
    if any(event.get("cat") == "kernel" for event in spans):  # it is waited while NCCL's kernels run and nothing else
        category, kernels = "gpu_user_annotation", [event for event in spans if event.get("cat") in KERNELS]
        waiting = _union(event for event in kernels if "nccl" in event["name"].lower())
        computing = _union(event for event in kernels if "nccl" not in event["name"].lower())
    else:  # while the thread is inside an operation that communicates
        category, thread = "user_annotation", label[0].get("tid")
        own = [event for event in spans if event.get("tid") == thread and event.get("cat") == "cpu_op"]
        waiting, computing = _union(event for event in own if event["name"].startswith(COMMUNICATION)), []
    seconds, waited = dict[str, float](), dict[str, float]()
    for part in STEP_PARTS:
        its = _union(event for event in spans if event["name"] == PART + part and event.get("cat") == category)
        waited[part] = _overlap(its, waiting, computing)
        seconds[part] = _length(its) - waited[part]
    seconds["communication"] += sum(waited.values())
    wall = _length(_union(label))
    seconds["other"] = max(0.0, wall - sum(spent for part, spent in seconds.items() if part != "other"))
    return {"wall_s": wall, "parts": seconds, "inside": {part: waited[part] for part in ("forward", "backward")}}


def format_split(split: Mapping[str, Any]) -> str:
    """A line for each part: its seconds, and its share of the step."""
    rows = list(split["parts"].items())
    at = 1 + list(split["parts"]).index("communication")
    rows[at:at] = [(f"  in {part}", seconds) for part, seconds in split["inside"].items()]
    return "\n".join(
        f"{name:<15}{seconds:>10.4f} s{100 * seconds / split['wall_s']:>7.1f} %"
        for name, seconds in [*rows, ("step", split["wall_s"])]
    )


def _union(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """When at least one of the events goes on."""
    return _merged((event["ts"], event["ts"] + event["dur"]) for event in events)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as disjoint intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    """In seconds."""
    return sum(end - begin for begin, end in _merged(intervals)) / 1e6


def _overlap(one: list[Interval], other: list[Interval], but: list[Interval]) -> float:
    """Seconds for which the first two go on and the third does not: |A and B| = |A| + |B| - |A or B|, twice."""
    found = _length([*one, *but]) + _length([*other, *but]) - _length([*one, *other, *but]) - _length(but)
    return max(0.0, round(found, 9))
