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
    """The schedule that a user asks for."""

    schedule: str
    pp: int
    microbatches: int
    vpp: int = 1
    group_size: int | None = None

    @property
    def group(self) -> int:
        """Microbatches that a rank takes through one chunk in a row before it goes on with the next chunk: as asked, or
        the smallest number from pp on that leaves no short rest."""
        sizes = range(self.pp, self.microbatches + 1)
        return self.group_size or next((size for size in sizes if not 0 < self.microbatches % size < self.pp), self.pp)


def schedule_flaws(request: ScheduleRequest) -> Iterator[tuple[str, str]]:
    """Everything that keeps the request from being a schedule: the setting, and the rule that it breaks."""
    name, pp, microbatches, group = request.schedule, request.pp, request.microbatches, request.group_size
    chunked = SCHEDULE_TRAITS[name].chunked
    if chunked != (request.vpp > 1):
        rule = "takes several chunks" if chunked else "takes one chunk"
        yield "parallel.schedule", f"{name} {rule} of layers for each rank, not parallel.vpp={request.vpp}"
    if group is not None and not chunked:
        yield "parallel.microbatch_group_size", f"has no effect with parallel.schedule={name}"
    if chunked and microbatches < pp:
        rule = f"{name} needs a microbatch for each of parallel.pp={pp} ranks, and there are {microbatches}"
        yield "train.global_batch_size", rule
    elif chunked and group is not None and (not pp <= group <= microbatches or 0 < microbatches % group < pp):
        rule = f"must be from parallel.pp={pp} to {microbatches}, the microbatches, and leave none or {pp} for the last"
        yield "parallel.microbatch_group_size", rule
