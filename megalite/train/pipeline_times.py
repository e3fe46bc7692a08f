"""When the ranks of a run's first pipeline did what in a step, as lines of its pipeline.jsonl."""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.checkpoint.commit import open_to_append
from megalite.pipeline.actions import parse_action
from megalite.pipeline.simulator import Span

if TYPE_CHECKING:
    from megalite.launch.context import ParallelContext

FILE = "pipeline.jsonl"


def write_times(run_dir: Path, step: int, schedule: str, spans: Sequence[Span], context: "ParallelContext") -> None:
    """Append the `spans` (`time.perf_counter`) of the first pipeline's ranks in a step; all ranks of the run call it.

    They are recorded in the time of day: the one clock that hosts share.
    """
    place = context.coordinates
    first = all(place[axis] == 0 for axis in place if axis != "pp")
    since = time.time() - time.perf_counter()
    mine = [[str(action), start + since, end + since] for action, start, end in spans] if first else []
    everyone = context.gather_json(mine)
    if context.rank == 0:
        pipeline = context.members("pp-forward")
        with open_to_append(run_dir / FILE) as file:
            for at, rank in enumerate(pipeline):
                spans_of_rank = [Span(parse_action(cell), start, end) for cell, start, end in everyone[rank]]
                file.write(recording_line(step, schedule, len(pipeline), at, spans_of_rank))


def recording_line(step: int, schedule: str, pp: int, rank: int, spans: Iterable[Span]) -> str:
    """What a run appends for one step and pipeline rank, with its newline."""
    actions = [[str(action), start, end] for action, start, end in spans]
    return json.dumps({"step": step, "schedule": schedule, "pp": pp, "rank": rank, "actions": actions}) + "\n"
