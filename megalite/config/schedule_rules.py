"""Which schedules of a pipeline suit which sizes. The schedules themselves are in `megalite.pipeline`; here only their
names and what follows from them are known."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ScheduleTraits(NamedTuple):
    """`chunked`: goes through several chunks of layers on each rank. `splitting`: puts weight gradients off."""

    chunked: bool = False
    splitting: bool = False


SCHEDULE_TRAITS = {
    "1f1b": ScheduleTraits(),
    "interleaved": ScheduleTraits(chunked=True),
    "zb-h1": ScheduleTraits(splitting=True),
    "gpipe": ScheduleTraits(),
}


@dataclass(frozen=True)
class ScheduleRequest:
    """What a user asks for. `group_size=None`: the smallest from pp on that suits the number of microbatches."""

    schedule: str
    pp: int
    microbatches: int
    vpp: int = 1
    group_size: int | None = None

    @property
    def group(self) -> int:
        """Microbatches that a rank takes through one chunk in a row before it goes on with the next chunk."""
        return self.group_size or default_group_size(self.pp, self.microbatches)


def default_group_size(pp: int, microbatches: int) -> int:
    """pp where it divides the number of microbatches, else the smallest size above that leaves no short rest."""
    return next((size for size in range(pp, microbatches + 1) if not _short_rest(pp, microbatches, size)), pp)


def schedule_flaws(request: ScheduleRequest) -> Iterator[tuple[str, str]]:
    """Everything that keeps the request from being a schedule: the setting, and the rule that it breaks."""
    name, pp, microbatches, group = request.schedule, request.pp, request.microbatches, request.group_size
    if not SCHEDULE_TRAITS[name].chunked:
        if request.vpp > 1:
            rule = f"{name} works on one chunk of layers for each rank, not on parallel.vpp={request.vpp}"
            yield "parallel.schedule", rule
        if group is not None:
            yield "parallel.microbatch_group_size", f"has no effect with parallel.schedule={name}"
        return
    if request.vpp == 1:
        yield "parallel.schedule", f"{name} goes through several chunks of a rank, and parallel.vpp=1 is one chunk"
    if microbatches < pp:
        rule = f"{name} needs a microbatch for each of parallel.pp={pp} ranks, and there are {microbatches}"
        yield "train.global_batch_size", rule
    elif group is not None and not pp <= group <= microbatches:
        rule = f"must be from parallel.pp={pp} to {microbatches}, the number of microbatches"
        yield "parallel.microbatch_group_size", rule
    elif group is not None and (rest := _short_rest(pp, microbatches, group)):
        rule = f"leaves {rest} of {microbatches} microbatches for the last group, fewer than parallel.pp={pp}"
        yield "parallel.microbatch_group_size", rule


def _short_rest(pp: int, microbatches: int, group_size: int) -> int:
    """The microbatches of the last group where they are too few to keep all ranks busy, else 0."""
    rest = microbatches % group_size
    return rest if rest < pp else 0
