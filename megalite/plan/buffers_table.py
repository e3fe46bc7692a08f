"""The buffers of one rank as text: its buckets, with what they hold and cost."""

from collections.abc import Callable, Iterator, Mapping
from math import prod

from megalite.errors.problems import several
from megalite.layout.buffer_layout import Bucket, BufferLayout, Kind
from megalite.layout.matrices import work_of_ranks
from megalite.optim.rank_buffers import RankBuffers, StateBytes

Kept = Callable[[BufferLayout], StateBytes]  # what a rank keeps of these buckets: `bytes_of_rank` for some settings


def buffer_lines(buffers: RankBuffers, kept: Kept, homes: Mapping[Kind, int]) -> Iterator[str]:
    """All buckets together, the ranks that share them, and a line per bucket, in the order in which backward completes
    them. `homes`: how many ranks of each owner orthogonalise its matrices of a kind, if any do."""
    buckets, state = buffers.layout.buckets, kept(buffers.layout)
    elements, padding, *_ = counts = _counts(*buckets)
    held = f"{elements - padding:,} parameters in {several(len(buckets), 'bucket')}"
    whole = f"parameters {_mib(state.parameters)}, gradients {_mib(state.gradients)}"
    share = f"its share of masters {_mib(state.masters)} and optimizer state {_mib(state.optimizer)}"
    yield f"rank {buffers.rank} holds {held}, {padding:,} elements of padding"
    yield f"and keeps {_mib(state.total)} MiB: {whole}, {share}"
    for kind in dict.fromkeys(bucket.kind for bucket in buckets):
        ranks = buffers.owners[kind]
        owners = f"every bucket is cut into {len(ranks)} slices, owned by the ranks {', '.join(map(str, ranks))}"
        if len(ranks) == 1:
            owners = f"rank {ranks[0]} owns all of every bucket: the optimizer's state is not sharded"
        about = "experts: " if kind == "expert" else ""
        yield f"{about}{owners}"
        work = work_of_ranks(buffers.layout, kind, len(ranks), homes[kind]) if kind in homes else [0]
        if any(work):
            least, most, mean = (f"{each / 1e9:,.4g}" for each in (min(work), max(work), sum(work) / len(work)))
            yield f"{about}a polynomial of Muon's takes {least} to {most} GFLOP on a rank, {mean} on average"
    yield ""
    heads = ("bucket", "elements", "padding", "slice", "tensors", "MiB kept", "from .. to")
    rows: list[tuple[str, ...]] = [heads]
    for number, bucket in enumerate(buckets):
        special = " expert" * (bucket.kind == "expert") + " master" * (bucket.precision == "master")
        names = f"{bucket.slots[0].record.name} .. {bucket.slots[-1].record.name}"
        cells = [f"{count:,}" for count in _counts(bucket)]
        rows.append((f"{number}{special}", *cells, _mib(kept(BufferLayout((bucket,))).total), names))
    rows.append(("all", *(f"{count:,}" for count in counts), _mib(state.total), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *numbers, names in rows:
        yield "  ".join([*map(str.rjust, numbers, widths), names]).rstrip()


def _counts(*buckets: Bucket) -> tuple[int, int, int, int]:
    """Elements, those of them that belong to no parameter, those of this rank's slices; tensors."""
    slots = [slot for bucket in buckets for slot in bucket.slots]
    elements = sum(bucket.size for bucket in buckets)
    padding = elements - sum(prod(slot.shard.shape) for slot in slots)
    return elements, padding, sum(bucket.slice_size for bucket in buckets), len(slots)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
