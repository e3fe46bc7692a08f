"""Describes when each pipeline rank did what, simulated or recorded: the bubble, and what each rank holds.

A run records steps in pipeline.jsonl, a line for each step and rank of the run's first pipeline, from rank 0 on:

    {"step": 20, "schedule": "1f1b", "pp": 4, "rank": 0, "actions": [["0F0", 0.0, 0.0131], ["0F1", 0.0131, 0.0262]]}

Times are seconds on one clock for all ranks of a step. A step that is not whole is passed over; of a step that was done
again the last lines count. No torch import.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.schedule_request import ScheduleRequest
from megalite.errors.problems import several
from megalite.pipeline.actions import ActionKind, Schedule, in_flight, parse_action
from megalite.pipeline.schedules import SCHEDULES, build_schedule
from megalite.pipeline.simulator import Durations, Span, equal_durations, simulate
from megalite.plan.picture import LETTER, Picture
from megalite.train.history import PIPELINE

Unit = tuple[str, float]  # of shown times: the unit's name, and how many make a unit of the timeline
LEFT, WIDE, RIGHT, TOP, ROW = 66, 960, 120, 62, 28  # room for names, boxes, what is held, titles; a row's height
MOST_PASSES = 20_000  # of microbatches through chunks, of a schedule that a report shows
TAIL = 2**24  # bytes at the end of pipeline.jsonl that hold the last step
FORWARD_PASSES: Unit = ("forward passes of a rank", 1)  # as equal_durations has it
MILLISECONDS: Unit = ("ms", 1000)  # of recorded seconds


@dataclass(frozen=True)
class Timeline:
    """The spans of each pipeline rank in order, all on one clock of any unit that begins at 0."""

    name: str
    vpp: int
    microbatches: int
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def pp(self) -> int:
        return len(self.ranks)

    @property
    def makespan(self) -> float:
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle time per computing time, as the papers count it: (pp-1)/microbatches for 1f1b and equal stages."""
        computing = sum(span.end - span.start for spans in self.ranks for span in spans)
        return self.pp * self.makespan / computing - 1 if computing else 0.0

    @property
    def title(self) -> str:
        chunks = f", vpp {self.vpp}" if self.vpp > 1 else ""
        return f"{self.name}: pp {self.pp}{chunks}, {several(self.microbatches, 'microbatch')}"

    def summary(self, unit: Unit) -> str:
        """How long the step is and how much of it is lost."""
        bubble = self.bubble
        idle = f"idle {bubble / (1 + bubble):.1%} of it (bubble: {bubble:.4g} of the time spent computing)"
        return f"step {self.makespan * unit[1]:.4g} {unit[0]}; {idle}"

    def held(self, rank: int) -> str:
        """The most that a rank holds, in activations of all its layers: a chunk counts for its share."""
        return several(in_flight(span.action for span in self.ranks[rank]) / self.vpp, "microbatch")


def simulated(schedule: Schedule, durations: Durations | None = None, transfer: float = 0) -> Timeline:
    """The timeline that the simulator computes; by default all ranks take equally long, in forward passes of a rank."""
    share = 1 / schedule.vpp  # of a rank's layers
    ranks = simulate(schedule, durations or equal_durations(schedule, share), transfer)
    return Timeline(schedule.name, schedule.vpp, schedule.microbatches, ranks)


def read_recording(run_dir: Path) -> tuple[int, Timeline] | None:
    """The last step that a run recorded whole and its timeline, which begins at 0; None where there is none."""
    recorded = dict[int, tuple[str, int, list[list[Span]]]]()
    with suppress(OSError), (run_dir / PIPELINE).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        for line in file:
            with suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                spans = [Span(parse_action(cell), *map(float, times)) for cell, *times in record["actions"]]
                if record["rank"] == 0:
                    recorded[record["step"]] = record["schedule"], record["pp"], []
                recorded[record["step"]][2].append(spans)
    whole = [step for step, (_, pp, ranks) in recorded.items() if len(ranks) == pp]
    if not whole:
        return None
    name, _, ranks = recorded[max(whole)]
    zero = min((spans[0].start for spans in ranks if spans), default=0.0)
    actions = [span.action for spans in ranks for span in spans]
    return max(whole), Timeline(
        name,
        vpp=1 + max((action.chunk for action in actions), default=0),
        microbatches=1 + max((action.microbatch for action in actions), default=-1),
        ranks=tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in spans) for spans in ranks),
    )


def pictures_of_run(run_dir: Path, config: Mapping[str, Any], dp: int) -> Iterator[Picture]:
    """The last step that a run with a pipeline recorded, and the schedule where all chunks take equally long. `config`:
    the settings by dotted name."""
    pp, vpp = (int(config.get(f"parallel.{name}") or 1) for name in ("pp", "vpp"))
    batch, micro = (int(config.get(f"train.{name}_batch_size") or 1) for name in ("global", "micro"))
    microbatches = batch // (micro * dp)
    if found := read_recording(run_dir):
        step, timeline = found
        yield schedule_picture(timeline, MILLISECONDS, f"{timeline.title}; recorded in step {step}")
    name, group = str(config.get("parallel.schedule")), config.get("parallel.microbatch_group_size")
    if 1 < pp * vpp * microbatches <= MOST_PASSES and pp > 1 and name in SCHEDULES:
        timeline = simulated(build_schedule(ScheduleRequest(name, pp, microbatches, vpp, group)))
        yield schedule_picture(timeline, FORWARD_PASSES, f"{timeline.title}; if all chunks took equally long")


def schedule_picture(timeline: Timeline, unit: Unit, title: str) -> Picture:
    """A row for each rank with a box for each action, over an axis of the time."""
    picture, longest = Picture(title), timeline.makespan
    floor = TOP + timeline.pp * ROW + 4
    picture.text(0, 14, title, "title")
    picture.text(0, 34, timeline.summary(unit))
    picture.text(LEFT + WIDE + 8, TOP - 4, "holds at most")
    for rank in range(timeline.pp):
        top = TOP + rank * ROW
        picture.rect(LEFT, top + 0.08 * ROW, WIDE, 0.84 * ROW, "idle")
        _draw_actions(picture, timeline, rank, top, WIDE / (longest or 1))
        picture.text(LEFT - 8, top + ROW / 2 + 4, f"rank {rank}", "end strong")
        picture.text(LEFT + WIDE + 8, top + ROW / 2 + 4, timeline.held(rank))
    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.text(LEFT + share * WIDE, floor + 14, f"{share * longest * unit[1]:.4g}", "mid")
    picture.text(LEFT + WIDE / 2, floor + 30, f"time, in {unit[0]}", "mid")
    at = float(LEFT)
    for style in [*dict.fromkeys(span.action.kind for spans in timeline.ranks for span in spans), "idle"]:
        chunks = f", chunks 0-{timeline.vpp - 1}" if timeline.vpp > 1 and style != "idle" else ""  # from dark to light
        picture.rect(at, floor + 42, 12, 12, style)
        picture.text(at + 18, floor + 52, style + chunks)
        at += 38 + LETTER * len(style + chunks)
    picture.width, picture.height = LEFT + WIDE + RIGHT, floor + 62
    return picture


def _draw_actions(picture: Picture, timeline: Timeline, rank: int, top: float, scale: float) -> None:
    """Boxes of a kind and chunk are one path, with the numbers of microbatches where there is room."""
    boxes = defaultdict[tuple[ActionKind, int], list[str]](list)
    for action, start, end in timeline.ranks[rank]:
        left, width = LEFT + start * scale, 0.98 * (end - start) * scale
        line = f"M{left:.5g} {top + 0.08 * ROW:.5g}h{width:.4g}v{0.84 * ROW:.4g}h{-width:.4g}z"
        boxes[action.kind, action.chunk].append(line)
    for (kind, chunk), lines in boxes.items():
        picture.path("".join(lines), kind, 1 - 0.55 * chunk / max(1, timeline.vpp - 1))
    for action, start, end in timeline.ranks[rank]:
        if (end - start) * scale > 7 * len(str(action.microbatch)) + 4:
            style = "in-box" if 2 * action.chunk < timeline.vpp else "in-box strong"
            picture.text(LEFT + (start + end) / 2 * scale, top + ROW / 2 + 4, str(action.microbatch), style)
