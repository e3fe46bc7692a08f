"""The values worth trying for a setting that breaks a rule, the nearest to the one given first."""

from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from math import gcd, lcm
from typing import Any

from megalite.config.case import Case, default_of
from megalite.config.derive import derive_model
from megalite.config.parallel_rules import data_parallel_size, layout_of_case, stages_of_case
from megalite.config.schedule_rules import SCHEDULES
from megalite.errors.remedies import divisors
from megalite.layout.layout_rules import AXES
from megalite.layout.ranks import DEFAULT_ORDER
from megalite.layout.stage_rules import StageSettings
from megalite.layout.stage_string import LayoutError, example_layout, layout_counts, without_prediction

LARGEST_FACTORED = 1 << 24  # of worlds beyond any machine, only the small divisors are looked for
SMALL = 4096
REACH = 64
SIZES = ("dp", *(f"parallel.{axis}" for axis in (*AXES, "etp")), "optimizer.instances")
NEEDED = ("world_size", "parallel.schedule", "train.micro_batch_size", "train.compile")  # or better said than left out


def candidates(case: Case, name: str) -> Iterator[Any]:
    """Values of the setting to try, some without end; for what can be left out, that is the last."""
    given = case.value(name)
    if name in FORMULAS:
        tried = FORMULAS[name](case)
    else:
        tried = _nearest(_sizes(case.world_size), given or 1) if name in SIZES else ()
    yield from tried
    yield from unset(case, name)


def unset(case: Case, name: str) -> list[Any]:
    """The default of what can be left out, if it is not."""
    default = default_of(name)
    can_be = name not in NEEDED and case.value(name) != default and (default is None or default is False)
    return [default] if can_be else []


def _nearest(values: Iterable[int], given: int) -> list[int]:
    return sorted(values, key=lambda value: abs(value - given))


def _around(given: int, least: int, most: int | None = None) -> list[int]:
    """Whole numbers within the limits, the nearest first."""
    near = max(given, least) if most is None else min(max(given, least), max(most, least))
    last = near + REACH if most is None else min(near + REACH, most)
    return _nearest(range(max(least, near - REACH), last + 1), given)


def _multiples(unit: int, near: int, offset: int = 0) -> Iterator[int]:
    """Numbers above 0 that are `offset` more than a multiple of `unit`, the nearest first."""
    below = (near - offset) // unit * unit + offset
    above = below + unit
    while True:
        if below > 0 and near - below <= above - near:
            yield below
            below -= unit
        else:
            if above > 0:
                yield above
            above += unit


def _sizes(world: int) -> list[int]:
    return divisors(world) if world <= LARGEST_FACTORED else [n for n in range(1, SMALL + 1) if world % n == 0]


def _worlds(case: Case) -> Iterator[int]:
    request, world = layout_of_case(case), case.world_size
    dense, expert = request.dense_product, request.expert_product
    steps = (lcm(dense, expert), dense, expert)  # the latter two for one of several problems
    worlds = [n for step in steps for n in (world // step * step, (world // step + 1) * step, step)]
    replicas, train = data_parallel_size(case.config, world), case.config.train
    if replicas is not None:  # as many of them as divide the batch
        worlds.append(gcd(train.global_batch_size // (train.micro_batch_size or 1), replicas) * world // replicas)
    yield from (n for n in dict.fromkeys(worlds) if n)


def _orders(case: Case) -> Iterator[str]:
    named = case.config.parallel.order.lower().split("-")
    placed = [axis for axis in dict.fromkeys(named) if axis in AXES]
    completed = placed + [axis for axis in AXES if axis not in placed]
    yield from ("-".join(placed if placed == named else completed), "-".join(completed))
    yield from ("-".join([*(axis for axis in completed if axis != "pp"), "pp"]), DEFAULT_ORDER)


def _layer_counts(case: Case) -> Iterator[int]:
    s = stages_of_case(case)
    vpp, ends = s.vpp or 1, s.asked("first_layers", "last_layers")
    if s.layout is not None:
        yield from [sum(_placed(s))] if sum(_placed(s)) else []
    elif s.split_rank is not None:
        encoder, decoder = s.split_rank - s.standalone_embedding, s.pp - s.split_rank
        yield from _multiples(lcm(encoder, decoder), s.num_layers) if min(encoder, decoder) > 0 else []
    elif counted := s.asked("count_embedding", "count_loss"):
        yield from _multiples(s.pp * vpp, s.num_layers, -len(counted))
    else:
        taken, ranks = sum(getattr(s, end) for end in ends), s.pp - len(ends) - s.standalone_embedding
        yield from _multiples(ranks * vpp, s.num_layers, taken) if ranks > 0 else [taken] if taken else []


def _placed(settings: StageSettings) -> tuple[int, ...]:
    """Layers of each stage of a layout that can be read, else nothing."""
    try:
        return () if settings.layout is None else layout_counts(settings.layout)
    except LayoutError:
        return ()


def _layouts(case: Case) -> Iterator[str]:
    axes = case.config.parallel
    if axes.pipeline_layout is not None:
        yield without_prediction(axes.pipeline_layout)
    yield example_layout(case.config.model.num_layers, axes.pp * axes.vpp)


def _batches(case: Case) -> Iterator[int]:
    train = case.config.train
    yield from _multiples(
        (train.micro_batch_size or 1) * (data_parallel_size(case.config, case.world_size) or 1), train.global_batch_size
    )


def _micro_batches(case: Case) -> list[int]:
    train, replicas = case.config.train, data_parallel_size(case.config, case.world_size) or 1
    given = train.micro_batch_size  # who leaves it open gets the largest that fits
    return [] if given is None else _nearest(divisors(max(1, train.global_batch_size // replicas)), given)


def _ramps(case: Case) -> Iterator[list[int]]:
    train, full = case.config.train, case.config.train.global_batch_size
    usual = (full // 2, full // 2, 100 * full)
    numbers = zip_longest(train.batch_ramp or [], usual)
    start, increment, samples = [asked if asked and asked > 0 else other for asked, other in islice(numbers, 3)]
    unit = (train.micro_batch_size or 1) * (data_parallel_size(case.config, case.world_size) or 1)
    starts = _nearest(range(unit, full, unit), start)[:REACH]
    tried = [(first, step) for first in starts for step in divisors(full - first) if step % unit == 0]
    for first, step in sorted(tried, key=lambda pair: (abs(pair[0] - start) + abs(pair[1] - increment), pair)):
        yield [first, step, samples]


def _derived_width(case: Case) -> int:
    """The inner width of the MLP where it is not set."""
    return derive_model(case.config.model, case.config.train.seq_length).ffn_hidden_size or 1


def _ends(case: Case, given: int | None) -> list[int]:
    return [] if given is None else _around(given, 0, case.config.model.num_layers)


def _group_sizes(case: Case) -> list[int]:
    axes = case.config.parallel
    given = axes.microbatch_group_size
    return [] if given is None else _nearest({*_around(given, 1), axes.pp, axes.pp + 1}, given)


FORMULAS: dict[str, Any] = {
    "world_size": _worlds,
    "split_rank": lambda case: [] if case.split_rank is None else _around(case.split_rank, 1, case.config.parallel.pp),
    "parallel.order": _orders,
    "parallel.vpp": lambda case: dict.fromkeys((*_around(case.config.parallel.vpp, 1), 1)),
    "parallel.schedule": lambda case: SCHEDULES,
    "parallel.microbatch_group_size": _group_sizes,
    "parallel.pipeline_layout": _layouts,
    "parallel.first_stage_layers": lambda case: _ends(case, case.config.parallel.first_stage_layers),
    "parallel.last_stage_layers": lambda case: _ends(case, case.config.parallel.last_stage_layers),
    "parallel.sequence_parallel": lambda case: [False] * (case.config.parallel.tp > 1),
    "model.num_layers": _layer_counts,
    "model.num_key_value_heads": lambda case: _nearest(
        divisors(case.config.model.num_attention_heads), case.config.model.num_key_value_heads or 1
    ),
    "train.global_batch_size": _batches,
    "train.micro_batch_size": _micro_batches,
    "train.batch_ramp": _ramps,
    "train.compile": lambda case: [False],
    **{
        name: lambda case, name=name: _multiples(case.config.parallel.tp, case.value(name) or _derived_width(case))
        for name in ("model.num_attention_heads", "model.ffn_hidden_size", "model.vocab_multiple", "train.seq_length")
    },
}
