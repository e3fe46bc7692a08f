"""Gradients travel while backward runs, in one order on all ranks, whatever a rank leaves unused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.data.batch import Batch, whole_batch
from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import buffer_layout
from megalite.layout.parameters import ParameterRecord
from megalite.optim import zero as zero_module
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.zero import GradientSync, ReplicaGroups, part_of
from megalite.train.build import build_training, fill_with_start_values
from megalite.train.step import TrainStep
from tests.optim.small_model import small_config
from tests.ranks import run_ranks


def size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def index(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def batch_of(context: ParallelContext, number: int, *, masked: bool = False) -> Batch:
    """Two sequences of random tokens, others on every data-parallel rank and in every microbatch."""
    drawn = torch.Generator().manual_seed(10 * number + context.index("dp"))
    tokens = torch.randint(50, (2, 9), generator=drawn)
    mask = torch.zeros(2, 8, dtype=torch.bool) if masked else torch.ones(2, 8, dtype=torch.bool)
    positions = torch.arange(8).expand(2, 8)
    return whole_batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions, None, 0)


# --- overlap -----------------------------------------------------------------------------------------------------


def events_of_a_step(context: ParallelContext, changes: dict[str, Any], microbatches: int) -> list[str]:
    """What happens in a step, in order: `backward`, `end of backward`, `bucket N started`."""
    config = small_config(optimizer=changes)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    events: list[str] = []

    def recorded(start: Any) -> Any:
        def started(tensor: Tensor, group: dist.ProcessGroup, *, comm_dtype: torch.dtype) -> Any:
            buckets = training.buffers.gradient_buckets
            number = next(at for at, bucket in enumerate(buckets) if bucket.data_ptr() == tensor.data_ptr())
            events.append(f"bucket {number} started")
            return start(tensor, group, comm_dtype=comm_dtype)

        return started

    for name in ("bucket_reduce_scatter", "bucket_all_reduce"):
        setattr(zero_module, name, recorded(getattr(zero_module, name)))
    backward = torch.autograd.backward

    def observed(*args: Any, **kwargs: Any) -> None:
        events.append("backward")
        backward(*args, **kwargs)
        events.append("end of backward")

    torch.autograd.backward = observed  # type: ignore[assignment]
    step = TrainStep(training, config.optimizer, context)
    step([batch_of(context, number) for number in range(microbatches)], 16 * microbatches, 1e-3)
    training.gather.finish()
    return events


@pytest.mark.parametrize("zero", [0, 1])
def test_buckets_start_in_the_last_backward_and_in_order(zero: int) -> None:
    found = run_ranks(events_of_a_step, 2, {"zero": zero, "bucket_size": 1}, 3)
    for events in found:
        starts = [event for event in events if event.startswith("bucket")]
        assert starts == [f"bucket {number} started" for number in range(len(starts))]
        last = len(events) - events[::-1].index("backward")
        assert not any(event.startswith("bucket") for event in events[:last]), "before the last microbatch"
        during = events[last : events.index("end of backward", last)]
        assert len(during) == len(starts), "all of them before backward ends"
        assert len(starts) > 10


def test_without_overlap_nothing_starts_before_backward_has_ended() -> None:
    for events in run_ranks(events_of_a_step, 2, {"overlap": False, "bucket_size": 1}, 2):
        assert "end of backward" not in events[events.index("bucket 0 started") :]


def test_one_rank_sends_nothing() -> None:
    assert not any(event.startswith("bucket") for event in events_of_a_step(ParallelContext(), {}, 1))


# --- what a rank leaves unused -----------------------------------------------------------------------------------


class Branches(nn.Module):
    """y = first(x), then one of two branches."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False, dtype=dtype)
        self.left = nn.Linear(16, 16, bias=False, dtype=dtype)
        self.right = nn.Linear(16, 16, bias=False, dtype=dtype)

    def forward(self, x: Tensor, *, left: bool) -> Tensor:
        y: Tensor = (self.left if left else self.right)(torch.tanh(self.first(x)))
        return y


def branched_gradients(context: ParallelContext, zero: bool, uses_left: list[bool]) -> list[tuple[str, int, Tensor]]:
    """(name, first element, summed gradients) of what this rank owns; rank r takes the branch that it is told."""
    torch.manual_seed(0)
    model = Branches(torch.float64)
    records = [
        ParameterRecord(name, tuple(value.shape), "normal", 0.1, True, place=at)
        for at, (name, value) in enumerate(model.named_parameters())
    ]
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    replicas = ReplicaGroups.of_rank(context, zero=zero)
    dense = replicas["dense"].shard_group
    layout = buffer_layout(records, dense_shards=size(dense), bucket_size=1)
    buffers = TrainingBuffers(layout, dtype=torch.float64, device=context.device, dense=index(dense))
    buffers.attach(model)
    buffers.fill(start.items())
    sync = GradientSync(buffers, [model], replicas, comm_dtype=torch.float64)
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(context.rank))
    for _ in range(2):  # the second step is like the first
        buffers.start_step()
        sync.expect_last(0, lambda start: start())
        model(x, left=uses_left[context.rank]).square().sum().backward()
        sync.finish()
    return [
        (
            each.slot.record.name,
            each.in_parameter.start,
            buffers.gradients[each.bucket][each.in_slice.start : each.in_slice.stop],
        )
        for each in buffers.owned
    ]


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("uses_left", [[True, True], [True, False], [False, True]])
def test_unused_parameters_hang_nothing_and_leave_the_others_right(zero: bool, uses_left: list[bool]) -> None:
    torch.manual_seed(0)
    model = Branches(torch.float64)
    for rank, left in enumerate(uses_left):
        x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        model(x, left=left).square().sum().backward()
    expected = {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in model.named_parameters()
    }
    covered = dict.fromkeys(expected, 0)
    for owned in run_ranks(branched_gradients, 2, zero, uses_left, dtype=torch.float64, timeout=30):
        for name, first, found in owned:
            torch.testing.assert_close(found, expected[name].flatten()[first : first + len(found)], rtol=1e-12, atol=0)
            covered[name] += len(found)
    assert all(count == 256 * (1 if zero else 2) for count in covered.values())


# --- experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_waited_for_where_they_are_used_in_the_order_in_which_they_travel(tied: bool) -> None:
    """Waiting for a late one first, on a communicator that keeps its order, would be waiting for all."""
    config = small_config(optimizer={"bucket_size": 1}, model={"tie_embeddings": tied})
    training = build_training(config, ParallelContext())
    used: list[str] = []
    (chunk,) = training.chunks
    chunk.before_use = used.append
    training.executor.evaluate([batch_of(ParallelContext(), 0)], torch.ones(()))
    order = list(dict.fromkeys(used))
    buckets = reversed(training.buffers.layout.buckets)
    assert order == list(dict.fromkeys(part_of(slot.record.name) for bucket in buckets for slot in bucket.slots[::-1]))
    assert used[-1] == ("embedding" if tied else "head")
