"""What a rank has open is no more than was asked for, and a limit is raised where that is allowed."""

import os
import resource

import pytest
import torch

from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.launch.host import BESIDES, ENOUGH, allow_open_files, files_of
from megalite.layout.groups import GroupNeeds, groups_of
from megalite.layout.ranks import ParallelLayout
from tests.ranks import run_ranks


def opened(context: ParallelContext) -> int:
    """Files of this process, all of its groups having been used."""
    for group in context.groups.values():
        torch.distributed.all_reduce(torch.ones(1), group=group)
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("layout", [ParallelLayout(dp=4), ParallelLayout(tp=2, dp=2)], ids=["dp", "tp and dp"])
def test_a_rank_has_no_more_files_open_than_were_asked_for(layout: ParallelLayout) -> None:
    needs = GroupNeeds(background_saving=True)
    alone, *others = run_ranks(opened, 1) + run_ranks(opened, 4, layout=layout, needs=needs)
    groups = files_of(groups_of(layout, 1, needs).values(), 4, on_gpu=False) - BESIDES
    assert all(groups / 2 <= count - alone <= groups for count in others), (alone, others, groups)


def test_on_a_gpu_only_the_groups_of_the_host_count() -> None:
    specs = groups_of(ParallelLayout(dp=8), 0, GroupNeeds(background_saving=True)).values()
    assert files_of(specs, 8, on_gpu=True) == BESIDES + 8 + 2 * (7 + 4)  # the control group, and that of saving
    assert files_of(specs, 8, on_gpu=False) > files_of(specs, 8, on_gpu=True)


def test_the_soft_limit_is_raised_as_far_as_allowed_and_the_hard_one_kept() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        allow_open_files(300)
        raised, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert kept == hard
        assert raised == (ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_hard_limit_below_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(UserError, match=r"ulimit -Hn=4096: .* need up to 9,000 open files(.|\n)*nofile=9000"):
        allow_open_files(9000)
