"""pipeline.jsonl: when each pipeline rank did what in the recorded steps of a run, one JSON object a line.

    {"step": 20, "schedule": "1f1b", "pp": 4, "rank": 0, "actions": [["0F0", 0.0, 0.0131], ["0F1", 0.0131, 0.0262]]}

One line for each step and pipeline rank, from one of the run's pipelines. Times are seconds on one clock for all ranks
of a step, whatever its zero. A step's lines come from rank 0 on; where a run was killed, some are torn or missing, and
the step is passed over. Of a step that was done again the last complete lines count. No torch import.
"""

import json
from pathlib import Path

from megalite.errors.problems import Problem, UserError
from megalite.pipeline.actions import parse_action
from megalite.pipeline.simulator import Span
from megalite.plan.timeline import Timeline
from megalite.train.history import PIPELINE


def read_recording(run_dir: Path, step: int | None = None, setting: str = "run_dir") -> tuple[int, Timeline]:
    """A recorded step (default: the last one) and its timeline, which begins at 0. Raises UserError where it is not
    there."""
    try:
        recorded = _complete((run_dir / PIPELINE).read_text(errors="replace").splitlines())
        rule = f"{PIPELINE} holds no step of which all ranks are recorded"
    except OSError as error:
        recorded, rule = {}, f"{PIPELINE} cannot be read there: {error.strerror}"
    if not recorded:
        raise UserError(Problem(setting, str(run_dir), rule, "the folder of a run that recorded its pipeline"))
    chosen = max(recorded) if step is None else step
    if chosen not in recorded:
        remedy = f"step {min(recorded, key=lambda one: abs(one - chosen))}, or none for the last"
        raise UserError(Problem(setting, str(run_dir), f"step {chosen} is not recorded", remedy))
    return chosen, recorded[chosen]


def _complete(lines: list[str]) -> dict[int, Timeline]:
    """By step: those of which all ranks are there."""
    complete: dict[int, Timeline] = {}
    ranks: list[tuple[Span, ...]] = []  # of the step that is being read
    reading: tuple[int, int, str] | None = None
    for line in lines:
        try:
            record = json.loads(line)
            step, pp, rank, schedule = int(record["step"]), int(record["pp"]), record["rank"], str(record["schedule"])
            spans = tuple(Span(parse_action(cell), float(begin), float(end)) for cell, begin, end in record["actions"])
        except (ValueError, TypeError, KeyError, OverflowError, UserError):
            ranks = []
            continue
        if rank == 0 or (step, pp, schedule) != reading:
            ranks, reading = [], (step, pp, schedule)
        if rank == len(ranks):
            ranks.append(spans)
            if len(ranks) == pp:
                complete[step] = _timeline(schedule, ranks)
    return complete


def _timeline(schedule: str, ranks: list[tuple[Span, ...]]) -> Timeline:
    actions = [span.action for spans in ranks for span in spans]
    zero = min((spans[0].start for spans in ranks if spans), default=0.0)
    return Timeline(
        schedule,
        vpp=1 + max((action.chunk for action in actions), default=0),
        microbatches=1 + max((action.microbatch for action in actions), default=-1),
        ranks=tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in spans) for spans in ranks),
    )
