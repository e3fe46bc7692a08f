"""When the ranks of a run's first pipeline did what in a step, as lines of its pipeline.jsonl."""

import time
from collections.abc import Sequence
from pathlib import Path

from megalite.parallel.context import ParallelContext
from megalite.pipeline.actions import parse_action
from megalite.pipeline.recording import FILE, recording_line
from megalite.pipeline.timeline import Span


def write_times(run_dir: Path, step: int, schedule: str, spans: Sequence[Span], context: ParallelContext) -> None:
    """Append the `spans` (`time.perf_counter`) of the first pipeline's ranks in a step; all ranks of the run call it.

    They are told in the time of day: the one clock that hosts share.
    """
    place = context.coordinates
    first = all(place[axis] == 0 for axis in place if axis != "pp")
    since = time.time() - time.perf_counter()
    mine = [[str(action), start + since, end + since] for action, start, end in spans] if first else []
    everyone = context.gather_json(mine)
    if context.rank == 0:
        pipeline = context.members("pp-forward")
        with (run_dir / FILE).open("a") as file:
            for at, rank in enumerate(pipeline):
                told = [Span(parse_action(cell), start, end) for cell, start, end in everyone[rank]]
                file.write(recording_line(step, schedule, len(pipeline), at, told))
