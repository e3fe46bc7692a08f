"""Which schedules of a pipeline suit which sizes, and what would work where they do not.

The schedules themselves are in `megalite.pipeline`; here only their names are known. The one check for the launcher's
config and for commands: each names the settings in its own way. Each remedy is found by trying it: the request, changed
as it says, breaks no further rule. No torch import.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from megalite.config.problems import Problem
from megalite.config.settings import SETTINGS
from megalite.config.suggest import nearest
from megalite.parallel.remedies import is_whole, number_meant, told

SCHEDULES = SETTINGS["parallel.schedule"].choices
SIZES = ("pp", "vpp", "microbatches", "group_size")
KINDS = {*SIZES, "unknown", "pipeline", "chunks", "few", "group"}  # of broken rules
TRIED = 64  # values around the one given, of which each is tried as a remedy
ALL = ("schedule", "vpp", "group_size")  # changed together: to a schedule of one chunk, without groups
OFFERED = {"schedule": len(SCHEDULES), "vpp": 2, "microbatches": 2, "group_size": 3, "pp": 3}


@dataclass(frozen=True)
class ScheduleRequest:
    """What a user asks for. `group_size=None`: the smallest from pp on that suits the number of microbatches."""

    schedule: str
    pp: int
    microbatches: int
    vpp: int = 1
    group_size: int | None = None


@dataclass(frozen=True)
class Naming:
    """How a user knows the fields of a request. Where the batch is set in sequences, `microbatches` is that setting's
    name, and `sequences` how many make one microbatch of all replicas together."""

    schedule: str = "schedule"
    pp: str = "pp"
    vpp: str = "vpp"
    microbatches: str = "microbatches"
    group_size: str = "group_size"
    sequences: int = 1

    def shown(self, field: str, value: Any) -> Any:
        """A value of a field as the user sets it."""
        return value * self.sequences if field == "microbatches" and is_whole(value, 0) else value

    def told(self, field: str, values: list[Any]) -> str:
        """`pp=2 or 4`"""
        if field == "schedule":
            return f"{self.schedule}={' or '.join(values)}"
        return told(getattr(self, field), [self.shown(field, value) for value in values])


PLAIN = Naming()
Accepts = Callable[[ScheduleRequest], bool]  # whether a changed request suits what else is said about its sizes


def anything(request: ScheduleRequest) -> bool:
    """Nothing else is said."""
    return True


def default_group_size(pp: int, microbatches: int) -> int:
    """pp where it divides the number of microbatches, else the smallest size above that leaves no short rest."""
    return next((size for size in range(pp, microbatches + 1) if not _short_rest(pp, microbatches, size)), pp)


def schedule_problems(request: ScheduleRequest, names: Naming = PLAIN, accepts: Accepts = anything) -> list[Problem]:
    """Everything that keeps the request from being a schedule. Sizes may be of any type: whatever a user wrote.

    A remedy offers only what `accepts`, the caller's own judgement of the changed request, agrees to.
    """
    broken = list(_broken(request, names))
    return [
        Problem(
            getattr(names, one.field),
            names.shown(one.field, getattr(request, one.field)),
            one.rule,
            _remedy(request, one, {other.kind for other in broken} - {one.kind}, names, accepts),
        )
        for one in broken
    ]


def broken_rules(request: ScheduleRequest) -> frozenset[tuple[str, str]]:
    """The rules that the request breaks, as (field, kind): to see whether a change would break one more."""
    return frozenset((one.field, one.kind) for one in _broken(request, PLAIN))


@dataclass(frozen=True)
class _Broken:
    """A broken rule about `field`, and the fields which, changed alone or together, may mend it."""

    field: str
    kind: str
    rule: str
    fixes: tuple[tuple[str, ...], ...]


def _broken(request: ScheduleRequest, names: Naming) -> Iterator[_Broken]:
    bad = [field for field in SIZES if not _is_size(request, field)]
    for field in bad:
        yield _Broken(field, field, "must be a whole number, at least 1", ((field,),))
    if not (isinstance(request.schedule, str) and request.schedule in SCHEDULES):
        near = nearest(str(request.schedule), SCHEDULES, cutoff=0.3)
        hint = f", {near} is the nearest" if near else ""
        yield _Broken("schedule", "unknown", f"unknown choice{hint}", (("schedule",), ALL))
        return
    if "vpp" not in bad:
        yield from _chunks(request, names)
    if request.schedule == "interleaved" and not {"pp", "microbatches", "group_size"} & {*bad}:
        yield from _groups(request, names)
    elif request.schedule != "interleaved" and request.group_size is not None and "group_size" not in bad:
        rule = f"has no effect with {names.schedule}={request.schedule}"
        yield _Broken("group_size", "group", rule, (("group_size",),))


def _chunks(request: ScheduleRequest, names: Naming) -> Iterator[_Broken]:
    if request.vpp > 1 and request.pp == 1:
        rule = f"virtual stages divide the stages of a pipeline, and {names.pp}=1 has none"
        yield _Broken("vpp", "pipeline", rule, (("vpp",), ("pp",), ALL))
    elif request.schedule == "interleaved" and request.vpp == 1:
        rule = f"goes to and fro between the chunks of a rank, and {names.vpp}=1 is one chunk"
        yield _Broken("schedule", "chunks", rule, (("vpp",), ("schedule",), ALL))
    elif request.schedule != "interleaved" and request.vpp > 1:
        rule = f"works on one chunk of layers for each rank, not on {names.vpp}={request.vpp}"
        yield _Broken("schedule", "chunks", rule, (("schedule",), ("vpp",)))


def _groups(request: ScheduleRequest, names: Naming) -> Iterator[_Broken]:
    pp, microbatches, group = request.pp, request.microbatches, request.group_size
    if microbatches < pp:
        made = "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
        rule = f"makes {made}, and interleaved needs one for each of {names.pp}={pp} ranks"
        yield _Broken("microbatches", "few", rule, (("microbatches",), ALL))
    elif group is not None and not pp <= group <= microbatches:
        rule = f"must be from {names.pp}={pp} to {microbatches}, the number of microbatches"
        yield _Broken("group_size", "group", rule, (("group_size",),))
    elif group is not None and (rest := _short_rest(pp, microbatches, group)):
        rule = f"leaves {rest} of {microbatches} microbatches for the last group, fewer than {names.pp}={pp}"
        yield _Broken("group_size", "group", rule, (("group_size",), ("microbatches",)))


def _short_rest(pp: int, microbatches: int, group_size: int) -> int:
    """The microbatches of the last group where they are too few to keep all ranks busy, else 0."""
    rest = microbatches % group_size
    return rest if rest < pp else 0


def _is_size(request: ScheduleRequest, field: str) -> bool:
    value = getattr(request, field)
    return is_whole(value, 1) or (field == "group_size" and value is None)


def _remedy(request: ScheduleRequest, one: _Broken, others: set[str], names: Naming, accepts: Accepts) -> str:
    """Changes after which no rule is broken; failing that, none but those that are reported as well, and at the very
    least not this one."""
    for allowed, agrees in (
        (set[str](), accepts),
        (others, accepts),
        (others, anything),
        (KINDS - {one.kind}, anything),
    ):
        texts: list[str] = []
        mended: set[str] = set()
        for fields in one.fixes:
            if mended & {*fields}:  # fewer changes are enough
                continue
            found = list(islice(_working(request, fields, allowed, agrees, names), OFFERED[fields[0]]))
            if found and len(fields) == 1:
                texts.append(names.told(fields[0], [value for (value,) in found]))
                mended.update(fields)
            elif found:
                changes = [pair for pair in zip(fields, found[0], strict=True) if pair[1] != getattr(request, pair[0])]
                together = " with ".join(names.told(field, [value]) for field, value in changes)
                texts.append(together.replace(" with leave ", ", and leave "))
        if texts:
            return ", or ".join(texts)
    raise AssertionError(f"nothing mends {one} of {request}")


def _working(
    request: ScheduleRequest, fields: tuple[str, ...], allowed: set[str], accepts: Accepts, names: Naming
) -> Iterator[tuple[Any, ...]]:
    """Values of the fields that leave only the `allowed` rules broken."""
    plain = {"schedule": list(SCHEDULES), "vpp": [1], "group_size": [None]}
    tried = [_candidates(request, fields[0])] if len(fields) == 1 else [plain[field] for field in fields]
    for values in product(*tried):
        changed = replace(request, **dict(zip(fields, values, strict=True)))
        if {one.kind for one in _broken(changed, names)} <= allowed and accepts(changed):
            yield values


def _candidates(request: ScheduleRequest, field: str) -> list[Any]:
    """Values worth trying, the nearest first."""
    value = getattr(request, field)
    if field == "schedule":
        return list(SCHEDULES)
    near, pp = number_meant(value), number_meant(request.pp)
    tried = {*range(max(1, near - TRIED), near + TRIED + 1), max(pp, 1), max(pp, 1) + 1}
    sizes = sorted(tried, key=lambda size: abs(size - near))
    return [None, *sizes] if field == "group_size" else sizes
