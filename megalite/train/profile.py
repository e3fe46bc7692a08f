"""Where the time of single steps goes (train.profile_steps), by torch's profiler.

Each rank writes two files into the run's profile folder: `step-00000012-rank-00003.json`, the time split, and
`step-00000012-rank-00003.trace.json.gz`, which ui.perfetto.dev opens.

The trace holds the step and its parts as labelled ranges. What its layers wait for each other (tensor parallelism) lies
inside their forward and backward passes; here it is taken out of them and counts as communication. A communication that
goes on beside computing costs nothing and counts nowhere.
"""

import gzip
import json
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.config.durable_files import write_atomically
from megalite.train.history import STEP_PARTS, StepPart
from megalite.train.setup import Job

FOLDER = "profile"  # in a run's folder
STEP, PART = "train step", "part: "  # labels in a trace: of the whole step, and before the name of a part
LARGEST_TRACE = 256 << 20  # bytes before compression; to read it takes ten times as much memory
COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")  # operations on a CPU
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@contextmanager
def profiled_step(job: Job, step: int) -> Iterator[None]:
    """Profile the step that happens inside, up to the reading of its metrics; leaves its files, or a warning.

    The parts of the step are labelled ranges of the trace, one behind the other. Such a step waits for its device and
    takes longer than others.
    """
    training, device, folder = job.training, job.context.device, job.folder.path / FOLDER
    cuda, thread, label = device.type == "cuda", threading.get_ident(), ExitStack()

    def begin(part: StepPart) -> None:
        """The part that was open ends. Another thread's view of it (autograd's) is not the step's."""
        if threading.get_ident() == thread:
            label.close()
            label.enter_context(record_function(PART + part))

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as record:
        if cuda:
            torch.cuda.synchronize(device)
        with record_function("begin"):  # the first range of a trace costs what the others do not
            pass
        training.clock.listener = begin
        try:
            with record_function(STEP), label:
                begin("other")
                training.clock.restart()
                yield
                training.gather.finish()  # torch notes a transfer's end where its record was, freed or not
                label.close()
                if cuda:
                    torch.cuda.synchronize(device)
        finally:
            training.clock.listener = None
    try:
        split = write_profile(folder, step, job.context.rank, chrome_trace(record))
    except (OSError, ValueError) as error:  # an incomplete trace is no JSON
        job.log.note(f"warning: the profile of step {step} could not be kept: {type(error).__name__}: {error}")
    else:
        job.log.event("profile", step, folder=str(folder), **split)


def chrome_trace(record: profile) -> bytes:
    """The record as Chrome's JSON. Raises OSError, or ValueError where it is too large to keep."""
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        if (size := path.stat().st_size) > LARGEST_TRACE:
            raise ValueError(f"a trace of {size >> 20} MiB is too large to keep; fewer microbatches make it smaller")
        return path.read_bytes()


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
    # Between two of these instants nothing begins or ends.
    instants = np.unique([at for event in spans for at in (event["ts"], event["ts"] + event["dur"])])
    lengths, middles = np.diff(instants) / 1e6, (instants[1:] + instants[:-1]) / 2

    def during(chosen: Sequence[Mapping[str, Any]]) -> NDArray[np.bool_]:
        """For each stretch between two instants: whether at least one of these spans goes on."""
        begins = np.sort([event["ts"] for event in chosen])
        ends = np.sort([event["ts"] + event["dur"] for event in chosen])
        on: NDArray[np.bool_] = np.searchsorted(begins, middles) > np.searchsorted(ends, middles)
        return on

    if any(event.get("cat") == "kernel" for event in spans):  # it is waited while NCCL's kernels run and nothing else
        category, kernels = "gpu_user_annotation", [event for event in spans if event.get("cat") in KERNELS]
        waiting = during([event for event in kernels if "nccl" in event["name"].lower()])
        waiting &= ~during([event for event in kernels if "nccl" not in event["name"].lower()])
    else:  # while the thread is inside an operation that communicates
        category, thread = "user_annotation", label[0].get("tid")
        own = [event for event in spans if event.get("tid") == thread and event.get("cat") == "cpu_op"]
        waiting = during([event for event in own if event["name"].startswith(COMMUNICATION)])
    seconds, waited = dict[str, float](), dict[str, float]()
    for part in STEP_PARTS:
        its = during([event for event in spans if event["name"] == PART + part and event.get("cat") == category])
        waited[part], seconds[part] = float(lengths[its & waiting].sum()), float(lengths[its & ~waiting].sum())
    seconds["communication"] += sum(waited.values())
    wall = float(lengths[during(label)].sum())
    seconds["other"] = max(0.0, wall - sum(spent for part, spent in seconds.items() if part != "other"))
    return {"wall_s": wall, "parts": seconds, "inside": {part: waited[part] for part in ("forward", "backward")}}
