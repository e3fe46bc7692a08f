"""The test harness itself: a rank's failure, death or silence becomes a failure of the test that says which rank."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from tests.ranks import run_ranks


def _fail_on_rank_1(context: ParallelContext) -> None:
    if context.rank == 1:
        raise UserError(Problem("setting", "value", "is wrong", "make it right"))
    context.barrier()


def _die_on_rank_0(context: ParallelContext) -> None:
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    context.barrier()


def _sleep_on_rank_1(context: ParallelContext) -> None:
    if context.rank == 1:
        time.sleep(60)


@pytest.mark.parametrize(
    ("function", "error", "words", "timeout"),
    [
        (_fail_on_rank_1, UserError, "setting='value': is wrong", 60),
        (_die_on_rank_0, RuntimeError, "rank 0 died by SIGKILL", 20),
        (_sleep_on_rank_1, TimeoutError, r"(?s)no answer from rank\(s\) 1\n.*in _sleep_on_rank_1", 1.5),
    ],
)
def test_a_rank_that_does_not_return_fails_the_test(
    function: Callable[[ParallelContext], None], error: type[Exception], words: str, timeout: float
) -> None:
    begin = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        run_ranks(function, 2, timeout=timeout)
    assert function != _fail_on_rank_1 or "_fail_on_rank_1" in str(caught.value.__cause__), "the rank's traceback"
    assert time.monotonic() - begin < 40
