"""Single steps under torch's profiler (train.profile_steps).

Each rank writes two files into the run's profile folder: `step-00000012-rank-00003.trace.json.gz`, which
ui.perfetto.dev opens, and `step-00000012-rank-00003.txt`, a table of the operations that took most of the time. The
trace holds the step and its parts (train/metrics.py) as labelled ranges, one behind the other.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.train.history import StepPart
from megalite.train.setup import Job

FOLDER = "profile"  # in a run's folder
ROWS = 30  # of the table


@contextmanager
def profiled_step(job: Job, step: int) -> Iterator[None]:
    """Profile the step that happens inside, up to the reading of its metrics; leaves its files, or a warning. Such a
    step waits for its device and takes longer than others."""
    clock, cuda, label = job.training.clock, job.context.device.type == "cuda", ExitStack()
    thread, unheard = threading.get_ident(), clock.listener

    def begin(part: StepPart) -> None:
        """The part that was open ends. Another thread's view of it (autograd's) is not the step's."""
        if threading.get_ident() == thread:
            label.close()
            label.enter_context(record_function(f"part: {part}"))

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as record:
        clock.listener = begin
        with record_function("train step"), label:
            clock.restart()
            yield
            job.training.gather.finish()  # torch notes a transfer's end where its record was, freed or not
            if cuda:
                torch.cuda.synchronize(job.context.device)
        clock.listener = unheard
    path = job.folder.path / FOLDER / f"step-{step:08d}-rank-{job.context.rank:05d}"
    try:
        path.parent.mkdir(exist_ok=True)
        record.export_chrome_trace(f"{path}.trace.json.gz")
        table = record.key_averages().table(sort_by=f"self_{'device' if cuda else 'cpu'}_time_total", row_limit=ROWS)
        path.with_suffix(".txt").write_text(f"{table}\n")
    except OSError as error:
        job.log.note(f"warning: the profile of step {step} could not be kept: {error}")
    else:
        job.log.event("profile", step, folder=str(path.parent))
