"""Which schedules of a pipeline suit which sizes. The schedules themselves are in `megalite.pipeline`; here only their
names are known."""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.settings import SETTINGS
from megalite.layout.flaws import Flaw, Show, is_whole, shown_by

SCHEDULES = SETTINGS["parallel.schedule"].choices


@dataclass(frozen=True)
class ScheduleRequest:
    """What a user asks for. `group_size=None`: the smallest from pp on that suits the number of microbatches."""

    schedule: str
    pp: int
    microbatches: int
    vpp: int = 1
    group_size: int | None = None


def default_group_size(pp: int, microbatches: int) -> int:
    """pp where it divides the number of microbatches, else the smallest size above that leaves no short rest."""
    return next((size for size in range(pp, microbatches + 1) if not _short_rest(pp, microbatches, size)), pp)


def schedule_flaws(request: ScheduleRequest, show: Show | None = None) -> list[Flaw]:
    """Everything that keeps the request from being a schedule."""
    show = show or shown_by(request)
    bad = [field for field in ("pp", "vpp", "microbatches", "group_size") if not _is_size(request, field)]
    flaws = [Flaw(field, "value", "must be a whole number, at least 1", (field,)) for field in bad]
    if request.schedule not in SCHEDULES:
        flaws.append(Flaw("schedule", "value", f"is none of {', '.join(SCHEDULES)}", ("schedule",)))
    return flaws or [*chunks_suit_the_schedule(request, show), *groups_suit_the_microbatches(request, show)]


def chunks_suit_the_schedule(request: ScheduleRequest, show: Show) -> Iterator[Flaw]:
    if request.vpp > 1 and request.pp == 1:
        rule = f"virtual stages divide the stages of a pipeline, and {show('pp')} has none"
        yield Flaw("vpp", "pipeline", rule, ("vpp", "pp"))
    elif request.schedule == "interleaved" and request.vpp == 1:
        rule = f"goes to and fro between the chunks of a rank, and {show('vpp')} is one chunk"
        yield Flaw("schedule", "chunks", rule, ("vpp", "schedule"))
    elif request.schedule != "interleaved" and request.vpp > 1:
        rule = f"works on one chunk of layers for each rank, not on {show('vpp')}"
        yield Flaw("schedule", "chunks", rule, ("schedule", "vpp"))


def groups_suit_the_microbatches(request: ScheduleRequest, show: Show) -> Iterator[Flaw]:
    pp, microbatches, group = request.pp, request.microbatches, request.group_size
    if request.schedule != "interleaved":
        if group is not None:
            yield Flaw("group_size", "group", f"has no effect with {show('schedule')}", ("group_size",))
    elif microbatches < pp:
        made = "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
        rule = f"makes {made}, and interleaved needs one for each of {show('pp')} ranks"
        yield Flaw("microbatches", "few", rule, ("micro_batch_size", "microbatches", "schedule"))
    elif group is not None and not pp <= group <= microbatches:
        rule = f"must be from {show('pp')} to {microbatches}, the number of microbatches"
        yield Flaw("group_size", "group", rule, ("group_size",))
    elif group is not None and (rest := _short_rest(pp, microbatches, group)):
        rule = f"leaves {rest} of {microbatches} microbatches for the last group, fewer than {show('pp')}"
        yield Flaw("group_size", "group", rule, ("group_size", "microbatches"))


def _short_rest(pp: int, microbatches: int, group_size: int) -> int:
    """The microbatches of the last group where they are too few to keep all ranks busy, else 0."""
    rest = microbatches % group_size
    return rest if rest < pp else 0


def _is_size(request: ScheduleRequest, field: str) -> bool:
    value = getattr(request, field)
    return is_whole(value, 1) or (field == "group_size" and value is None)
