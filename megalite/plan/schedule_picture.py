"""Draws a timeline, simulated or recorded: a row for each pipeline rank, a box for each action with its microbatch."""

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.config.schedule_rules import ScheduleRequest
from megalite.errors.problems import UserError
from megalite.pipeline.actions import ActionKind
from megalite.pipeline.schedules import build_schedule
from megalite.pipeline.simulator import equal_durations
from megalite.plan.picture import Picture
from megalite.plan.timeline import FORWARD_PASSES, MILLISECONDS, Timeline, Unit, read_recording, simulated

WORDS: dict[ActionKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward-input": "backward: gradients of activations",
    "backward-weight": "backward: gradients of weights",
}
LEFT, RIGHT, TOP, LETTER = 66, 120, 62, 6.4  # room for names of ranks, for what they hold, for titles; a letter
NARROWEST, WIDEST, MICROBATCH = 560.0, 1080.0, 84.0  # all boxes of a row; those of a microbatch, where there is room
ROW, HIGHEST, NAMED = 28.0, 700.0, 12.0  # a row; all rows; rows lower than this are named one in eight
MOST_PASSES = 20_000  # of microbatches through chunks, of a schedule that a report shows


def pictures_of_run(run_dir: Path, config: Mapping[str, Any], dp: int) -> list[Picture]:
    """The last step that a run with a pipeline recorded, and the schedule where all chunks take equally long. `config`:
    the settings by dotted name."""
    pictures = []
    pp, vpp = (int(config.get(f"parallel.{name}") or 1) for name in ("pp", "vpp"))
    batch, unit = int(config.get("train.global_batch_size") or 1), int(config.get("train.micro_batch_size") or 1) * dp
    if pp < 2:
        return []
    with suppress(UserError):  # nothing is recorded
        step, timeline = read_recording(run_dir)
        pictures.append(schedule_picture(timeline, MILLISECONDS, f"{timeline.title}; recorded in step {step}"))
    if pp * vpp * (batch // unit) <= MOST_PASSES:
        name, group_size = str(config.get("parallel.schedule")), config.get("parallel.microbatch_group_size")
        with suppress(ValueError, KeyError):  # the settings were changed
            schedule = build_schedule(ScheduleRequest(name, pp, batch // unit, vpp, group_size))
            line = simulated(schedule, equal_durations(schedule, 1 / vpp, 1 / vpp, 1 / vpp))
            pictures.append(schedule_picture(line, FORWARD_PASSES, f"{line.title}; if all chunks took equally long"))
    return pictures


def schedule_picture(timeline: Timeline, unit: Unit, title: str) -> Picture:
    """The whole picture."""
    picture, pp = Picture(title), timeline.pp
    row = min(ROW, HIGHEST / pp)
    work = timeline.computing / (pp * max(timeline.microbatches, 1))  # one scale for all schedules of a batch
    wide = min(max(MICROBATCH * timeline.makespan / work if work else 0, NARROWEST), WIDEST)
    picture.text(0, 14, title, "title")
    picture.text(0, 34, timeline.summary(unit))
    picture.text(LEFT + wide + 8, TOP - 18, "holds at most the")
    picture.text(LEFT + wide + 8, TOP - 4, "activations of")
    for rank in range(pp):
        top = TOP + rank * row
        picture.rect(LEFT, top + 0.08 * row, wide, 0.84 * row, "idle")
        _draw_actions(picture, timeline, rank, top, row, wide)
        if row >= NAMED or rank % 8 == 0:
            picture.text(LEFT - 8, top + row / 2 + 4, f"rank {rank}", "end strong")
            picture.text(LEFT + wide + 8, top + row / 2 + 4, timeline.held(rank))
    floor = TOP + pp * row + 4
    _draw_axis(picture, timeline.makespan * unit.scale, unit.words, floor, wide)
    at = float(LEFT)
    kinds = {span.action.kind for spans in timeline.ranks for span in spans}
    chunks = f", chunks 0-{timeline.vpp - 1}" if timeline.vpp > 1 else ""  # from dark to light
    for style, words in [*((kind, f"{WORDS[kind]}{chunks}") for kind in WORDS if kind in kinds), ("idle", "idle")]:
        picture.rect(at, floor + 42, 12, 12, style)
        picture.text(at + 18, floor + 52, words)
        at += 38 + LETTER * len(words)
    picture.width = max(LEFT + wide + RIGHT, at, LETTER * len(timeline.summary(unit)))
    picture.height = floor + 62
    return picture


def _draw_actions(picture: Picture, timeline: Timeline, rank: int, top: float, row: float, wide: float) -> None:
    """Boxes of a kind and chunk are one path. Where they are very thin, they begin and end at whole pixels."""
    spans, scale = timeline.ranks[rank], wide / (timeline.makespan or 1)
    thin = 3 * len(spans) > wide
    boxes = defaultdict[tuple[ActionKind, int], list[str]](list)
    numbers = []
    for action, start, end in spans:
        left, right = (round(at * scale, 0 if len(spans) > 2 * wide else 1) for at in (start, end))
        if right > left:
            width, high = right - left, 0.84 * row
            line = f"M{LEFT + left:.5g} {top + 0.08 * row:.5g}h{width:.5g}v{high:.4g}h{-width:.5g}z"
            boxes[action.kind, action.chunk].append(line)
            if row > 14 and width > 7 * len(str(action.microbatch)) + 4:
                style = "in-box" if 2 * action.chunk < timeline.vpp else "in-box strong"
                numbers.append((LEFT + (left + right) / 2, str(action.microbatch), style))
    for (kind, chunk), lines in boxes.items():
        lightness = 0.55 * chunk / (timeline.vpp - 1) if chunk else 0.0
        picture.path("".join(lines), f"box {kind}{' thin' if thin else ''}", 1 - lightness)
    for x, number, style in numbers:
        picture.text(x, top + row / 2 + 4, number, style)


def _draw_axis(picture: Picture, longest: float, words: str, floor: float, wide: float) -> None:
    """Time from 0 to the end of the step, with a few round numbers."""
    picture.path(f"M{LEFT} {floor}h{wide:.5g}", "axis")
    if longest > 0:
        power = 10.0 ** math.floor(math.log10(longest / 6))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= longest / 6)
        for number in range(int(longest / step + 1e-9) + 1):
            x = LEFT + number * step / longest * wide
            picture.path(f"M{x:.5g} {floor}v4", "axis")
            picture.text(x, floor + 16, f"{number * step:g}", "mid")
    picture.text(LEFT + wide / 2, floor + 31, f"time, in {words}", "mid")
