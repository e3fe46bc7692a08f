"""The ranks that are left agree on who ended the job."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from megalite.launch import failure_report
from megalite.launch.context import ParallelContext
from megalite.launch.failure_report import find_cause
from megalite.train.build import open_context
from tests.launch.test_startup import cpu_config, environment, free_port
from tests.ranks import run_ranks


def _lose(context: ParallelContext, port: int, lost: int, dies: bool) -> str:
    """The cause as this rank tells it, where rank `lost` dies or fails by itself."""
    context.close()
    started = open_context(cpu_config(), environment(context.rank, context.world_size, port))
    started.barrier()
    if dies:
        failure_report.WAIT_S = 0.5  # for a word that never comes
    if context.rank == lost and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == lost:
        return find_cause(started, ValueError("no such token"))
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1), group=started.group("dp-cp"))
    return find_cause(started, caught.value)


def test_a_rank_that_was_killed_is_named() -> None:
    causes = run_ranks(_lose, 2, free_port(), 1, True, may_die=[1])
    assert causes[0] == "no word from rank 1: killed, stopped or hanging"


def test_a_rank_s_own_error_is_the_cause_for_all() -> None:
    first, second = run_ranks(_lose, 2, free_port(), 1, False)
    assert first == second
    assert first.startswith("rank 1 on ")
    assert first.endswith(": ValueError: no such token")


def test_without_rank_0_there_is_nobody_to_ask() -> None:
    causes = run_ranks(_lose, 2, free_port(), 0, True, may_die=[0])
    assert causes[1] == "rank 0 has ended, and with it the place where the ranks met"


def test_a_single_process_has_nobody_to_ask() -> None:
    assert find_cause(ParallelContext(), ValueError()) == ""
