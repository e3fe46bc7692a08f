"""Ranks agree: problems, flags and objects of one rank are known to all, and a dead peer is noticed."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from megalite.errors.problems import Problem, UserError, refuse
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast
from tests.ranks import run_ranks


def _problem(name: str, value: Any = 1) -> Problem:
    return Problem(name, value, "is wrong", "make it right")


def _refuse(context: ParallelContext, names: dict[int, list[str]], value: Any) -> list[str] | None:
    try:
        all_ranks_or_raise(context, partial(refuse, [_problem(name, value) for name in names.get(context.rank, [])]))
    except UserError as error:
        return [problem.setting for problem in error.problems]
    return None


@pytest.mark.parametrize(
    ("names", "told"), [({0: ["a"], 2: ["b", "a", "c"]}, ["a", "b", "c"]), ({}, None)], ids=["some", "nobody"]
)
def test_all_ranks_refuse_together_with_the_union_of_their_problems(
    names: dict[int, list[str]], told: list[str] | None
) -> None:
    assert run_ranks(_refuse, 3, names, [1, {"odd": "value"}]) == [told] * 3


def _exchange(context: ParallelContext, value: Any) -> Any:
    dist.all_gather = None  # type: ignore[assignment]  # it would hold as many copies as there are ranks
    return rank0_broadcast(context, lambda: value if context.rank == 0 else "not sent")


def test_rank_0_s_object_reaches_all_ranks() -> None:
    value = {"name": "späte Größe", "list": [1, 2.5, None, True], "long": "x" * 100_000}
    assert run_ranks(_exchange, 2, value) == [value] * 2


def test_a_single_process_needs_no_group() -> None:
    context = ParallelContext()
    all_ranks_or_raise(context, partial(refuse, []))
    with pytest.raises(UserError, match="is wrong"):
        all_ranks_or_raise(context, partial(refuse, [_problem("a")]))
    assert rank0_broadcast(context, lambda: {"a": 1}) == {"a": 1}
    context.barrier()
    context.close()


ABORT = """
import ctypes, os, torch, torch.distributed as dist
from megalite.launch import context
class Group:
    def _get_backend(self, device):
        return self
    def _group_start(self):
        print("start")
    def _group_end(self):
        print("end")
    def abort(self):
        print("abort")
        if {hangs}:  # with Python's lock held
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
class Spec:
    traffic = "tensor"
dist.is_initialized, dist.destroy_process_group = (lambda: True), (lambda: print("destroyed"))
context.ABORT_S = 2.0
groups = dict(tp=Group(), dp=Group())
device = torch.device("cuda", 0)
one = context.ParallelContext(device=device, specs=dict(tp=Spec, dp=Spec), groups=groups, control_group=1)
one.close(failed=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="knows the mutex of glibc")
@pytest.mark.parametrize("hangs", [False, True])
def test_communicators_are_aborted_in_one_group_and_in_time(hangs: bool) -> None:
    """With fakes in place of NCCL's groups; nobody has run it on several GPUs."""
    command = [sys.executable, "-uc", ABORT.format(hangs=hangs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    whole = ["start", "abort", "abort", "end", "destroyed"]
    assert (done.returncode, done.stdout.split()) == ((1, whole[:2]) if hangs else (0, whole)), done.stderr
