"""The buffers of one rank as text: its buckets with what they hold and cost, and every range that the rank owns."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

from megalite.errors.words import several
from megalite.layout.buffer_layout import Bucket, BufferLayout, Kind
from megalite.optim.memory import StateBytes
from megalite.optim.rank_buffers import RankBuffers

FIRST, LAST = 24, 12  # rows of a long table that are shown
Cells = tuple[str, ...]
Kept = Callable[[BufferLayout], StateBytes]  # what a rank keeps of these buckets: `bytes_of_rank` for some settings


def header_lines(buffers: RankBuffers, kept: Kept) -> list[str]:
    """All buckets together, and the ranks that share them: two or three lines."""
    buckets = buffers.layout.buckets
    padding, state = padding_of(*buckets), kept(buffers.layout)
    total = sum(bucket.size for bucket in buckets)
    count = several(len(buckets), "bucket")
    share = f"{padding / total:.1%} padding" if 1000 * padding > total else f"{padding:,} elements of padding"
    lines = [
        f"rank {buffers.rank} holds {total - padding:,} parameters in {count}, {share}",
        f"and keeps {_mib(state.total)} MiB: parameters {_mib(state.parameters)}, gradients {_mib(state.gradients)}, "
        f"its share of masters {_mib(state.masters)} and optimizer state {_mib(state.optimizer)}",
    ]
    kinds: list[Kind] = list(dict.fromkeys(bucket.buffer.kind for bucket in buckets))
    return lines + [f"{'experts: ' if kind == 'expert' else ''}{_owners(buffers.owners[kind])}" for kind in kinds]


def bucket_lines(buffers: RankBuffers, kept: Kept, *, full: bool = False) -> Iterator[str]:
    """A line per bucket, in the order in which backward completes them; of many the first and last, with `full` all."""
    rows, sums = [], [0, 0, 0]
    for number, bucket in enumerate(buffers.layout.buckets):
        names, padding = [slot.record.name for slot in bucket.slots], padding_of(bucket)
        numbers = (bucket.size, padding, bucket.slice_size)
        sums = [before + more for before, more in zip(sums, numbers, strict=True)]
        held = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        cost = _mib(kept(BufferLayout((bucket,))).total)
        rows.append((bucket_name(number, bucket), *(f"{each:,}" for each in numbers), cost, str(len(names)), held))
    total, tensors = _mib(kept(buffers.layout).total), str(len(buffers.layout.slots))
    heads = ("bucket", "elements", "padding", "slice", "MiB kept", "tensors", "from .. to")
    last = ("all", *(f"{each:,}" for each in sums), total, tensors, "")
    yield from _table(heads, rows, "buckets", full=full, last=[last])


def owned_lines(buffers: RankBuffers, *, full: bool = False) -> Iterator[str]:
    """A line per range that the rank owns, `start:stop` as seen from each place; `full` as for `bucket_lines`."""
    rows: list[Cells] = []
    for each in buffers.owned:
        size = prod(each.slot.shard.shape)
        part = "all" if len(each.in_parameter) == size else f"{_slice(each.in_parameter)} of {size}"
        first = each.slot.start + each.in_parameter.start
        in_bucket = range(first, first + len(each.in_parameter))
        rows.append((str(each.bucket), _slice(in_bucket), _slice(each.in_slice), part, each.slot.record.name))
    yield f"rank {buffers.rank} owns {sum(len(each.in_parameter) for each in buffers.owned):,} elements:"
    heads = ("bucket", "in bucket", "in slice", "in parameter", "parameter")
    yield from _table(heads, rows, "ranges", full=full)


def bucket_name(number: int, bucket: Bucket) -> str:
    """`3`, or `3 expert`, `3 master` where the bucket is not of the usual buffer."""
    special = ["expert"] * (bucket.buffer.kind == "expert") + ["master"] * (bucket.buffer.precision == "master")
    return " ".join([str(number), *special])


def padding_of(*buckets: Bucket) -> int:
    """Elements of these buckets that belong to no parameter."""
    filled = sum(prod(slot.shard.shape) for bucket in buckets for slot in bucket.slots)
    return sum(bucket.size for bucket in buckets) - filled


def _table(heads: Cells, rows: list[Cells], noun: str, *, full: bool, last: Sequence[Cells] = ()) -> Iterator[str]:
    """Columns of numbers to the right, the last one to the left; rows in the middle of a long table are counted."""
    left_out = 0 if full else max(0, len(rows) - FIRST - LAST)
    lines = [heads, *rows[:FIRST], *rows[FIRST + left_out :], *last]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for at, (*cells, words) in enumerate(lines):
        if left_out and at == 1 + FIRST:
            yield f"... {left_out:,} more {noun}: --all shows them"
        yield "  ".join([*map(str.rjust, cells, widths), words]).rstrip()


def _owners(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} owns all of every bucket: the optimizer's state is not sharded"
    named = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:4]))}, .. {ranks[-1]}"
    return f"every bucket is cut into {len(ranks)} slices, owned by the ranks {named}"


def _slice(where: range) -> str:
    return f"{where.start}:{where.stop}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
