"""The test harness itself: a rank's failure, death or silence becomes a failure of the test that says which rank."""

import os
import signal
import time

import pytest

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from tests.ranks import run_ranks


def _fail_on_rank_1(context: ParallelContext) -> None:
    if context.rank == 1:
        raise UserError(Problem("setting", "value", "is wrong", "make it right"))
    context.barrier()


def test_the_first_exception_is_raised_with_its_type_and_traceback() -> None:
    with pytest.raises(UserError, match="setting='value': is wrong") as caught:
        run_ranks(_fail_on_rank_1, 2)
    assert caught.value.problems == [Problem("setting", "value", "is wrong", "make it right")]
    assert "_fail_on_rank_1" in str(caught.value.__cause__)


def _die_on_rank_0(context: ParallelContext) -> None:
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    context.barrier()


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 0 died by SIGKILL"):
        run_ranks(_die_on_rank_0, 2, timeout=20)


def _sleep_on_rank_1(context: ParallelContext) -> int:
    if context.rank == 1:
        time.sleep(60)
    return os.getpid()


def test_a_hang_ends_in_time_and_names_the_silent_ranks_and_where_they_stood() -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)no answer from rank\(s\) 1\n.*in _sleep_on_rank_1"):
        run_ranks(_sleep_on_rank_1, 2, timeout=1.5)
    assert time.monotonic() - begin < 10
