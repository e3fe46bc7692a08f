"""pipeline.jsonl: when each pipeline rank did what in the recorded steps of a run, one JSON object a line.

    {"step": 20, "schedule": "1f1b", "pp": 4, "rank": 0, "actions": [["0F0", 0.0, 0.0131], ["0F1", 0.0131, 0.0262]]}

One line for each step and pipeline rank, from one of the run's pipelines. Times are seconds on one clock for all ranks
of a step, whatever its zero. A step's lines come from rank 0 on; lines that are torn, and steps of which a rank is
missing, as where a run was killed, are passed over; of a step that was done again, on as many ranks or others, the last
complete lines count. No torch import.
"""

import json
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from megalite.errors.problems import Problem, UserError
from megalite.pipeline.actions import parse_action
from megalite.pipeline.simulator import Span
from megalite.plan.timeline import Timeline
from megalite.train.pipeline_times import FILE


def read_recording(run_dir: Path, step: int | None = None, setting: str = "run_dir") -> tuple[int, Timeline]:
    """A recorded step (default: the last one) and its timeline, which begins at 0. Raises UserError where it is not
    there."""
    path = run_dir / FILE
    try:
        records = _complete(path.read_text(errors="replace").splitlines())
    except OSError as error:
        rule = f"{FILE} cannot be read there: {error.strerror}"
        raise UserError(
            Problem(setting, str(run_dir), rule, "the folder of a run that recorded its pipeline")
        ) from error
    if not records:
        rule = f"{FILE} holds no step of which all ranks are recorded"
        raise UserError(Problem(setting, str(run_dir), rule, "the folder of a run that recorded its pipeline"))
    if step is not None and step not in records:
        near = sorted(records, key=lambda one: abs(one - step))[:3]
        remedy = f"step {' or '.join(map(str, sorted(near)))}, or none for the last"
        raise UserError(Problem(setting, str(run_dir), f"step {step} is not recorded", remedy))
    chosen = max(records) if step is None else step
    return chosen, _timeline(records[chosen])


def _complete(lines: list[str]) -> dict[int, dict[int, dict[str, Any]]]:
    """By step and rank: the records of steps of which all ranks are there."""
    complete: dict[int, dict[int, dict[str, Any]]] = {}
    ranks: dict[int, dict[str, Any]] = {}  # of the step that is being read, up to the line before
    for record in map(_record, lines):
        if record is None or record["rank"] == 0 or not _continues(ranks, record):
            ranks = {}
        if record is not None and record["rank"] == len(ranks):
            ranks = {**ranks, len(ranks): record}
            if len(ranks) == record["pp"]:
                complete[record["step"]] = ranks
    return complete


def _continues(ranks: dict[int, dict[str, Any]], record: dict[str, Any]) -> bool:
    """Whether a line is the next of the step whose first ones are `ranks`."""
    same = ("step", "pp", "schedule")
    return bool(ranks) and record["rank"] == len(ranks) and all(record[name] == ranks[0][name] for name in same)


def _record(line: str) -> dict[str, Any] | None:
    """The object on a line if it is such a record, its actions as spans."""
    try:
        record = json.loads(line)
        spans = [Span(parse_action(cell), float(start), float(end)) for cell, start, end in record["actions"]]
        known = all(type(record[name]) is int for name in ("step", "pp", "rank")) and type(record["schedule"]) is str
    except (ValueError, TypeError, KeyError, UserError):
        return None
    times = [time for span in spans for time in span[1:]]
    ordered = all(earlier <= later for earlier, later in pairwise(times))
    return {**record, "actions": spans} if known and ordered and all(map(isfinite, times)) else None


def _timeline(ranks: dict[int, dict[str, Any]]) -> Timeline:
    lines = [ranks[rank]["actions"] for rank in range(len(ranks))]
    actions = [span.action for spans in lines for span in spans]
    zero = min((spans[0].start for spans in lines if spans), default=0.0)
    return Timeline(
        ranks[0]["schedule"],
        vpp=1 + max((action.chunk for action in actions), default=0),
        microbatches=1 + max((action.microbatch for action in actions), default=-1),
        ranks=tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in spans) for spans in lines),
    )
