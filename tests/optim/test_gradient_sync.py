"""Gradients travel while backward runs, in one order on all ranks, whatever a rank leaves unused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.data.batch import Batch, whole_batch
from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import buffer_layout, slice_ranges
from megalite.layout.groups import GroupNeeds
from megalite.layout.parameters import ParameterRecord
from megalite.layout.ranks import ParallelLayout
from megalite.optim import zero as zero_module
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.zero import GradientSync, ParameterGather, ReplicaGroups, part_of
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


def parameters_after_steps(context: ParallelContext, masked_rank: int | None) -> Any:
    """Losses, and parameters before and after two real steps; in the first, `masked_rank` sees only masked labels."""
    config = small_config()
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    step = TrainStep(training, config.optimizer, context)
    losses = []
    before = {name: value.clone() for name, value in training.chunks[0].named_parameters()}
    for number in range(2):
        masked = context.rank == masked_rank and number == 0
        figures = step([batch_of(context, number, masked=masked)], 0 if masked else 16, 1e-3).read()
        losses.append((figures.loss, figures.batch_tokens, figures.skipped))
    training.gather.finish()
    return losses, before, dict(training.chunks[0].named_parameters())


def test_a_rank_whose_microbatch_is_all_masked_adds_nothing() -> None:
    """Two ranks, one of them masked, train like the other one alone on its data."""
    (losses, _, found), _ = run_ranks(parameters_after_steps, 2, 1, dtype=torch.float64)
    assert [tokens for _, tokens, _ in losses] == [16, 32]
    assert not any(skipped for *_, skipped in losses)
    [(alone, _, _)] = run_ranks(parameters_after_steps, 1, None, dtype=torch.float64)
    assert losses[0][0] == pytest.approx(alone[0][0], rel=1e-12)
    assert all(torch.isfinite(value).all() for value in found.values())


# --- experts ------------------------------------------------------------------------------------------------------


class TwoExperts(nn.Module):
    """A dense layer and the experts of one rank."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16, bias=False, dtype=torch.float64)
        self.experts = nn.ModuleDict({str(at): nn.Linear(16, 16, bias=False, dtype=torch.float64) for at in experts})

    def forward(self, x: Tensor, expert: int) -> Tensor:
        y: Tensor = self.dense(x)
        return self.experts[str(expert)](y) if str(expert) in self.experts else y


EXPERTS = ParallelLayout(dp=4, ep=2, etp=1)  # two ranks have expert 0, two expert 1


def start_of(name: str) -> Tensor:
    return torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name) + ord(name[8])))


def train_experts(context: ParallelContext, zero: bool) -> dict[str, Tensor]:
    """One step: each rank puts its inputs through the expert that it has. Its parameters afterwards."""
    mine = context.index("ep")
    model = TwoExperts([mine])
    records = [
        ParameterRecord(name, (16, 16), "normal", 0.1, True, place=0, of_experts=name.startswith("experts"))
        for name, _ in model.named_parameters()
    ]
    replicas = ReplicaGroups.of_rank(context, zero=zero)
    dense, expert = replicas["dense"].shard_group, replicas["expert"].shard_group
    layout = buffer_layout(records, dense_shards=size(dense), expert_shards=size(expert), bucket_size=64)
    buffers = TrainingBuffers(
        layout,
        dtype=torch.float64,
        device=context.device,
        dense=index(dense),
        expert=index(expert),
    )
    buffers.attach(model)
    buffers.fill((name, start_of(name)) for name, _ in model.named_parameters())
    everything = slice_ranges(buffers.owned, lambda record, box: True)
    optimizer = FlatAdamW(buffers.masters, buffers.gradients, [(everything, 0.1)], (0.9, 0.95), 1e-8)
    sync = GradientSync(buffers, [model], replicas, comm_dtype=torch.float64)
    gather = ParameterGather(buffers, replicas)
    buffers.start_step()
    sync.expect_last(0, lambda start: start())
    one_loss(model, context.rank, mine).backward()
    sync.finish()
    one, no = torch.ones((), dtype=torch.float64), torch.zeros(())
    optimizer.step(torch.tensor(1e-2, dtype=torch.float64), gradient_scale=one, skip=no)
    buffers.round_masters()
    gather.start()
    gather.finish()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def one_loss(model: TwoExperts, rank: int, expert: int) -> Tensor:
    """This rank's part of the one loss: the mean over all ranks' tokens."""
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return model(x, expert).square().sum() / 32


@pytest.mark.parametrize("zero", [False, True])
def test_dense_and_expert_parameters_are_averaged_by_the_one_loss(zero: bool) -> None:
    """As in one process with both experts: experts are summed over the ranks that hold them, all else over all."""
    model = TwoExperts([0, 1])
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(start_of(name))
    found = run_ranks(train_experts, 4, zero, dtype=torch.float64, layout=EXPERTS, needs=GroupNeeds())
    expert_of = {
        rank: int(next(name for name in held if "experts" in name).split(".")[1]) for rank, held in enumerate(found)
    }
    assert sorted(expert_of.values()) == [0, 0, 1, 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    sum(one_loss(model, rank, expert) for rank, expert in expert_of.items()).backward()  # type: ignore[union-attr]
    optimizer.step()
    expected = dict(model.named_parameters())
    for held in found:
        for name, value in held.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-10, atol=1e-12)


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
