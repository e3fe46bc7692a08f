"""The buffers of one rank as text: its buckets with what they hold and cost, and every range that the rank owns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megalite.layout.buffer_layout import Bucket, BufferLayout, Kind
from megalite.optim.memory import StateBytes, bytes_of_rank
from megalite.optim.rank_buffers import RankBuffers

FIRST, LAST = 24, 12  # rows of a long table that are shown
MIB = 2**20
Cells = tuple[str, ...]


@dataclass(frozen=True)
class StateTypes:
    """What decides the bytes of an element: settings of these names, the precision not auto."""

    precision: str
    gradient_dtype: str = "fp32"
    moment_dtype: str = "fp32"


def header_lines(buffers: RankBuffers, types: StateTypes) -> list[str]:
    """What all buckets are together, and who shares them: two or three lines."""
    layout = buffers.layout
    total, padding = sum(layout.sizes.values()), padding_of(layout)
    count = f"{len(layout.buckets)} bucket{'s' if len(layout.buckets) > 1 else ''}"
    kept = _kept(layout, types)
    share = f"{padding / total:.1%} padding" if 1000 * padding > total else f"{padding:,} elements of padding"
    lines = [
        f"rank {buffers.rank} holds {total - padding:,} parameters in {count}, {share}",
        f"and keeps {_mib(kept.total)} MiB: parameters {_mib(kept.parameters)}, gradients {_mib(kept.gradients)}, "
        f"its share of masters {_mib(kept.masters)} and moments {_mib(kept.moments)}",
    ]
    kinds: list[Kind] = list(dict.fromkeys(bucket.buffer.kind for bucket in layout.buckets))
    return lines + [f"{'experts: ' if kind == 'expert' else ''}{_owners(buffers.owners[kind])}" for kind in kinds]


def bucket_lines(buffers: RankBuffers, types: StateTypes, *, full: bool = False) -> Iterator[str]:
    """A line per bucket, in the order in which backward completes them; of many the first and last, with `full` all."""
    buckets = buffers.layout.buckets
    rows = [_bucket_row(number, bucket, types) for number, bucket in enumerate(buckets)]
    sums = (sum(map(_size, buckets)), padding_of(buffers.layout), sum(bucket.slice_size for bucket in buckets))
    kept, tensors = _mib(_kept(buffers.layout, types).total), str(len(buffers.layout.slots))
    last = ("all", *(f"{each:,}" for each in sums), kept, tensors, "")
    heads = ("bucket", "elements", "padding", "slice", "MiB kept", "tensors", "from .. to")
    yield from _table(heads, rows, "buckets", full=full, last=last)


def owned_lines(buffers: RankBuffers, *, full: bool = False) -> Iterator[str]:
    """A line per range that the rank owns, `start:stop` as seen from each place that `OwnedRange` names; `full` as for
    `bucket_lines`."""
    rows = []
    for each in buffers.owned:
        size = prod(each.slot.shard.shape)
        part = "all" if len(each.in_parameter) == size else f"{_slice(each.in_parameter)} of {size}"
        places = (each.in_buffer, each.in_bucket, each.in_slice, each.in_shard)
        rows.append((str(each.bucket), *(map(_slice, places)), part, each.slot.record.name))
    yield f"rank {buffers.rank} owns {sum(len(each.in_parameter) for each in buffers.owned):,} elements:"
    heads = ("bucket", "in buffer", "in bucket", "in slice", "in shard", "in parameter", "parameter")
    yield from _table(heads, rows, "ranges", full=full)


def bucket_name(number: int, bucket: Bucket) -> str:
    """`3`, or `3 expert`, `3 master` where the bucket is not of the usual buffer."""
    special = ["expert"] * (bucket.buffer.kind == "expert") + ["master"] * (bucket.buffer.precision == "master")
    return " ".join([str(number), *special])


def padding_of(layout: BufferLayout) -> int:
    """Elements of all buckets that belong to no parameter."""
    return sum(map(_padding, layout.buckets))


def _bucket_row(number: int, bucket: Bucket, types: StateTypes) -> Cells:
    names = [slot.record.name for slot in bucket.slots]
    return (
        bucket_name(number, bucket),
        f"{_size(bucket):,}",
        f"{_padding(bucket):,}",
        f"{bucket.slice_size:,}",
        _mib(_kept(BufferLayout((bucket,)), types).total),
        str(len(names)),
        names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
    )


def _table(heads: Cells, rows: Sequence[Cells], noun: str, *, full: bool, last: Cells | None = None) -> Iterator[str]:
    """Columns of numbers to the right, the last one to the left; rows in the middle of a long table are counted."""
    left_out = 0 if full or len(rows) <= FIRST + LAST else len(rows) - FIRST - LAST
    shown = [*rows[:FIRST], *rows[FIRST + left_out :]]
    lines = [heads, *shown, *([last] if last else [])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for at, cells in enumerate(lines):
        if left_out and at == 1 + FIRST:
            yield f"... {left_out:,} more {noun}: --all shows them"
        figures = [cell.rjust(width) for cell, width in zip(cells[:-1], widths, strict=False)]
        yield "  ".join([*figures, cells[-1]]).rstrip()


def _owners(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} owns all of every bucket: the optimizer's state is not sharded"
    named = ", ".join(map(str, ranks if len(ranks) <= 8 else [*ranks[:4], "..", ranks[-1]])).replace("..,", "..")
    return f"every bucket is cut into {len(ranks)} slices, owned by the ranks {named}"


def _kept(layout: BufferLayout, types: StateTypes) -> StateBytes:
    return bytes_of_rank(layout, types.precision, gradient_dtype=types.gradient_dtype, moment_dtype=types.moment_dtype)


def _size(bucket: Bucket) -> int:
    return bucket.stop - bucket.start


def _padding(bucket: Bucket) -> int:
    return _size(bucket) - sum(prod(slot.shard.shape) for slot in bucket.slots)


def _slice(where: range) -> str:
    return f"{where.start}:{where.stop}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"
