"""Groups as communicators: every one of them sums what the arithmetic predicts, and none is made in vain."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalite.launch.context import ParallelContext
from megalite.launch.startup import join, make_groups
from megalite.layout.ranks import GroupNeeds, GroupSpec, ParallelLayout, all_groups, groups_of
from tests.ranks import run_ranks

FOLDED = ParallelLayout(tp=2, cp=2, pp=2, etp=1, ep=4)
LAYOUTS = {
    "tp2 dp2 pp2, tied": (ParallelLayout(tp=2, dp=2, pp=2), GroupNeeds(tied_embeddings=True)),
    "tp2 cp2 pp2 over ep4, tied": (FOLDED, GroupNeeds(tied_embeddings=True)),
    "pipelines inside dp": (ParallelLayout(tp=2, dp=2, pp=2, order="tp-cp-ep-pp-dp"), GroupNeeds()),
    "tp4 with two key-value heads": (ParallelLayout(tp=4, dp=2), GroupNeeds(kv_heads=2)),
    "two optimizer instances": (ParallelLayout(tp=2, dp=4, etp=1, ep=2), GroupNeeds(optimizer_instances=2)),
    "written behind training": (ParallelLayout(tp=2, dp=4), GroupNeeds(background_saving=True)),
}


def _sums(context: ParallelContext) -> dict[str, float]:
    """By group of more than one rank, the all-reduced sum of 2**rank: it names its summands."""
    found = {}
    for name in sorted(context.specs):  # in one order on all ranks
        group = context.group(name)
        if group is not None:
            number = torch.tensor(2.0**context.rank)
            dist.all_reduce(number, group=group)
            found[name] = float(number)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_group_sums_the_ranks_that_the_arithmetic_predicts(name: str) -> None:
    layout, needs = LAYOUTS[name]
    for rank, sums in enumerate(run_ranks(_sums, 8, layout=layout, needs=needs)):
        specs = groups_of(layout, rank, needs)
        expected = {name: sum(2.0**member for member in spec.ranks) for name, spec in specs.items()}
        assert sums == {name: total for name, total in expected.items() if len(specs[name].ranks) > 1}


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """`make(layout, rank, needs)`: the context of any rank of any layout, without other processes."""

    def make(layout: ParallelLayout, rank: int, needs: GroupNeeds | None = None) -> ParallelContext:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        return join(ParallelContext(layout, rank), timeout_s=10, needs=needs)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def groups_made() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_a_context_is_made_for_any_rank_without_processes(fake_world: Any) -> None:
    layout = ParallelLayout(tp=8, cp=2, dp=64, pp=16, etp=1, ep=64)
    needs = GroupNeeds(tied_embeddings=True)
    begin = time.process_time()
    listed = list(all_groups(layout, needs))
    middle = time.process_time()
    context = fake_world(layout, 9999, needs)
    assert time.process_time() - middle < 10 * (middle - begin), "twice the time of listing the groups, on any machine"
    assert len(listed) > 5_000
    assert context.size("tp") == context.group("tp").size() == 8
    assert context.index("dp-cp") == context.group("dp-cp").rank()
    assert context.coordinates == layout.coordinates(9999)


def test_groups_of_one_rank_are_never_made_and_equal_ones_once(fake_world: Any) -> None:
    context = fake_world(ParallelLayout(dp=4), 1, GroupNeeds(background_saving=True))
    assert context.group("tp") is context.group("pp-forward") is context.group("word-embedding") is None
    assert context.members("tp") == (1,)
    assert groups_made() == 3  # control, saving, and dp-cp and world in one
    assert context.group("world") is context.group("dp-cp") is not context.control_group
    assert [name for name, group in context.groups.items() if group is context.group("saving")] == ["saving"]


def test_equal_groups_share_a_communicator_within_one_class_of_traffic_only(fake_world: Any) -> None:
    context = fake_world(ParallelLayout(tp=2, pp=2), 0, GroupNeeds(tied_embeddings=True))
    assert context.group("tp") is not context.group("kv-replicas")
    pipeline = [context.group(name) for name in ("pp-forward", "pp-backward", "word-embedding")]
    assert len(set(pipeline)) == 3
    assert context.members("pp-forward") == context.members("word-embedding")


def test_ranks_along_axes_over_which_nothing_travels_are_known_and_no_group(fake_world: Any) -> None:
    context = fake_world(ParallelLayout(tp=2, dp=2, pp=2), 0)
    assert groups_made() == 6  # control, dp-cp, world, tp and the two directions of the pipeline
    assert context.members("tp-dp") == (0, 1, 2, 3)
    assert (context.size("dp"), context.index("dp")) == (2, 0)
    with pytest.raises(AssertionError, match="no group 'tp-dp'"):
        context.group("tp-dp")


def test_nccl_options_reach_their_groups_and_keep_them_apart(monkeypatch: pytest.MonkeyPatch, fake_world: Any) -> None:
    fake_world(ParallelLayout(dp=4), 0)
    made: list[dict[str, Any]] = []

    def record(ranks: list[int], **arguments: Any) -> object:
        made.append(arguments)
        return object()

    monkeypatch.setattr(dist, "new_group", record)
    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))  # where torch has none
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    first = {"is_high_priority_stream": True}
    options = {"dp-cp": {"max_ctas": 8, **first}, "pp-forward": first, "pp-backward": first}
    specs = all_groups(ParallelLayout(tp=2, dp=2, pp=2), GroupNeeds(background_saving=True))
    groups = make_groups(specs, 0, torch.device("cuda", 0), dist.default_pg_timeout, options)
    by_name = {arguments["group_desc"]: arguments for arguments in made}
    urgent = [name for name, given in by_name.items() if getattr(given["pg_options"], "is_high_priority_stream", False)]
    assert urgent == ["dp-cp", "pp-forward", "pp-backward"], "what nobody asks for is NCCL's choice"
    assert vars(by_name["dp-cp"]["pg_options"].config) == {"max_ctas": 8}
    assert by_name["world"]["pg_options"] is None
    assert groups["dp-cp"] is not groups["world"]
    assert by_name["dp-cp"]["backend"] == "nccl"
    assert by_name["saving"]["backend"] == "fake"  # as the world
    assert by_name["saving"]["device_id"] is None


@pytest.mark.gpu
def test_nccl_accepts_the_options(tmp_path: Path) -> None:
    device, layout = torch.device("cuda", 0), ParallelLayout()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        options: dict[str, Any] = {"cga_cluster_size": 2, "min_ctas": 1, "max_ctas": 8, "net_name": "socket"}
        world = GroupSpec("world", "gradient", (0,))
        timeout = dist.default_pg_timeout
        made = make_groups([world], 0, device, timeout, {"world": options | {"is_high_priority_stream": True}})
        number = torch.ones(layout.world_size, device=device)
        dist.all_reduce(number, group=made["world"])
        assert number.item() == 1
    finally:
        dist.destroy_process_group()
