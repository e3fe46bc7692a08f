"""Sums and gathers between real ranks: to the bit, whatever else is under way, and no more bytes than the formula."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.optim import bucket_collectives as collectives
from megalite.optim.bucket_collectives import (
    Pending,
    bucket_all_gather,
    bucket_all_reduce,
    bucket_reduce_scatter,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.live_bytes import LiveBytes

needs_proc = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="asks Linux how much a process has sent")
Transfer = Literal["reduce_scatter", "all_reduce", "all_gather"]
Check = Callable[[dist.ProcessGroup, int, torch.dtype, torch.dtype], bool]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TYPES = [(F32, F32), (F64, F64), (F32, BF16), (F32, F16), (F64, BF16), (BF16, BF16)]  # of the tensor, of what travels
SMALL_CHUNK = 1 << 10  # bytes; lengths below are several of them, or less than one
LENGTHS = [1, 37, 1000]  # per rank


def numbers(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What that rank has: any rank knows it. Over many magnitudes, so that another order of adding shows."""
    generator = torch.Generator().manual_seed(97 * seed + rank)
    signed = torch.randn(length, dtype=F64, generator=generator)
    return (signed * 2.0 ** torch.randint(-8, 9, (length,), generator=generator)).to(dtype)


def sum_for(owner: int, terms: Sequence[Tensor], comm_dtype: torch.dtype) -> Tensor:
    """In order of rank; all terms but the owner's were rounded on the way."""
    total = torch.zeros_like(terms[0])
    for rank, term in enumerate(terms):
        total += term if rank == owner else term.to(comm_dtype).to(term.dtype)
    return total


def group_of(context: ParallelContext) -> dist.ProcessGroup:
    group = context.group("dp-cp")
    assert group is not None
    return group


def each_case(context: ParallelContext, check: Check) -> list[tuple[int, torch.dtype, torch.dtype]]:
    """The (length, dtype, comm_dtype) for which the check fails."""
    collectives.CHUNK_BYTES = SMALL_CHUNK  # of this process only, as all that ranks change
    group = group_of(context)
    cases = [(length, dtype, comm_dtype) for length in LENGTHS for dtype, comm_dtype in TYPES]
    return [case for case in cases if not check(group, *case)]


def sum_is_in_order(group: dist.ProcessGroup, length: int, dtype: torch.dtype, comm_dtype: torch.dtype) -> bool:
    n, me = group.size(), group.rank()
    everyone = [numbers(rank, n * length, dtype) for rank in range(n)]
    bucket = everyone[me].clone()
    bucket_reduce_scatter(bucket, group, comm_dtype=comm_dtype).wait()
    own = slice(me * length, (me + 1) * length)
    return torch.equal(bucket[own], sum_for(me, [terms[own] for terms in everyone], comm_dtype))


def sum_is_everywhere(group: dist.ProcessGroup, length: int, dtype: torch.dtype, comm_dtype: torch.dtype) -> bool:
    n, me = group.size(), group.rank()
    length = n * length - 1  # no multiple of n
    everyone = [numbers(rank, length, dtype) for rank in range(n)]
    tensor = everyone[me].clone()
    bucket_all_reduce(tensor, group, comm_dtype=comm_dtype).wait()
    others = [torch.empty_like(tensor) for _ in range(n)]
    dist.all_gather(others, tensor, group=group)
    if not all(torch.equal(tensor, other) for other in others):
        return False
    if dtype == comm_dtype and dtype != BF16:  # torch's own: another order from three ranks on
        exact = sum_for(me, [terms.to(F64) for terms in everyone], F64)
        return torch.allclose(tensor.to(F64), exact, rtol=0, atol=8 * torch.finfo(dtype).eps * 2**8)
    owned = zip(*(terms.tensor_split(n) for terms in everyone), strict=True)
    sums = [sum_for(owner, terms, comm_dtype).to(comm_dtype).to(dtype) for owner, terms in enumerate(owned)]
    return torch.equal(tensor, torch.cat(sums))


def gather_is_whole(group: dist.ProcessGroup, length: int, dtype: torch.dtype, _: torch.dtype) -> bool:
    n, me = group.size(), group.rank()
    whole = numbers(0, n * length, dtype)
    bucket = torch.full_like(whole, torch.nan)
    bucket.chunk(n)[me].copy_(whole.chunk(n)[me])
    bucket_all_gather(bucket, group).wait()
    return torch.equal(bucket, whole)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("check", [sum_is_in_order, sum_is_everywhere, gather_is_whole])
def test_transfers_are_right_to_the_bit(check: Check, n: int) -> None:
    """A reduce-scatter adds in order of rank, an all-reduce gives all ranks the same bits."""
    assert run_ranks(each_case, n, check) == [[]] * n


def torch_agrees(group: dist.ProcessGroup, length: int, dtype: torch.dtype, comm_dtype: torch.dtype) -> bool:
    n, me = group.size(), group.rank()
    terms = [numbers(rank, n * length, dtype) for rank in range(n)]
    total = (terms[0].to(comm_dtype) + terms[1].to(comm_dtype)).to(dtype)
    scattered, reduced = terms[me].clone(), terms[me].clone()
    for pending in (
        bucket_reduce_scatter(scattered, group, comm_dtype=comm_dtype),
        bucket_all_reduce(reduced, group, comm_dtype=comm_dtype),
    ):
        pending.wait()
    same = torch.equal(scattered.chunk(n)[me], total.chunk(n)[me]) and torch.equal(reduced, total)
    return same and gather_is_whole(group, length, dtype, comm_dtype)


def each_case_with_torch(context: ParallelContext) -> list[tuple[int, torch.dtype, torch.dtype]]:
    collectives._is_gloo = lambda group: False
    return each_case(context, torch_agrees)


def test_the_way_of_other_backends_gives_the_same_sums() -> None:
    """torch's collectives, which all but gloo use, here on gloo. Two ranks: one order of adding."""
    assert run_ranks(each_case_with_torch, 2) == [[]] * 2


def _transfer_much(context: ParallelContext, seed: int) -> tuple[bool, list[bytes]]:
    """Sums, gathers and torch's own small collectives at once, with naps that are others on every rank."""
    collectives.CHUNK_BYTES = 4 * SMALL_CHUNK
    group, n, me = group_of(context), context.world_size, context.rank
    naps = random.Random(f"{seed} {me}")
    sums: list[tuple[Tensor, Pending]] = []
    gathers: list[tuple[Tensor, Pending]] = []
    works: list[tuple[Tensor, dist.Work]] = []
    fine = True

    def small_sum() -> bool:
        time.sleep(naps.uniform(0, 0.003))
        count = torch.tensor(me + 1)
        dist.all_reduce(count, group=group)
        return int(count) == n * (n + 1) // 2

    for number, length in enumerate((4000, 300, 20000, 4000, 1, 4000)):
        bucket = numbers(me, n * length, F64, seed=number)
        sums.append((bucket, bucket_reduce_scatter(bucket, group, comm_dtype=(F64, BF16)[number % 2])))
        fine = small_sum() and fine
        spread = numbers(0, n * length, F32, seed=number)
        gathers.append((spread, bucket_all_gather(spread, group)))
        flag = torch.full((8,), me + 1.0)
        works.append((flag, dist.all_reduce(flag, group=group, async_op=True)))
        everywhere = numbers(me, length, F32, seed=-number)
        sums.append((everywhere, bucket_all_reduce(everywhere, group, comm_dtype=(BF16, F32)[number % 2])))
    naps.shuffle(gathers)
    for (_, work), (_, pending) in zip(works, gathers, strict=True):
        work.wait()
        pending.wait()
    for _, pending in sums:
        pending.wait()
        fine = small_sum() and fine
    for number, (bucket, _) in enumerate(sums[::2]):
        terms = [numbers(rank, bucket.numel(), F64, seed=number).chunk(n)[me] for rank in range(n)]
        fine = fine and torch.equal(bucket.chunk(n)[me], sum_for(me, terms, (F64, BF16)[number % 2]))
    fine = fine and all(torch.equal(flag, torch.full((8,), n * (n + 1) / 2)) for flag, _ in works)
    results = [*(tensor.chunk(n)[me] for tensor, _ in sums[::2]), *(tensor for tensor, _ in sums[1::2])]
    return fine, [result.numpy().tobytes() for result in results]


@pytest.mark.parametrize("n", [2, 3])
def test_transfers_and_other_collectives_may_be_under_way_at_once(n: int) -> None:
    first, second = (run_ranks(_transfer_much, n, seed) for seed in (1, 2))
    assert all(fine for fine, _ in first + second)
    assert first == second, "timing changed a sum"
    assert len({tuple(results[6:]) for _, results in first}) == 1, "an all-reduce differs between ranks"


class Watched:
    """A group that counts messages which nobody has waited for yet."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.seen, self.under_way = group, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, *args: Any) -> "WatchedWork":
        return WatchedWork(self, self._group.send(*args))

    def recv(self, *args: Any) -> "WatchedWork":
        return WatchedWork(self, self._group.recv(*args))


class WatchedWork:
    def __init__(self, watched: Watched, work: dist.Work) -> None:
        self._watched, self._work = watched, work
        watched.seen += 1
        watched.under_way += 1

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
        self._watched.under_way -= 1


def _count_messages(context: ParallelContext) -> list[tuple[str, int, int]]:
    """Of each transfer: messages, and how many of them are still under way when it is over."""
    collectives._is_gloo, collectives.CHUNK_BYTES = lambda group: True, SMALL_CHUNK
    counts = []
    for comm_dtype in (F32, BF16):
        watched = Watched(group_of(context))
        for name, start in starters(cast(dist.ProcessGroup, watched), comm_dtype).items():
            before = watched.seen
            start(torch.ones(context.world_size * 1000)).wait()
            counts.append((f"{name} {comm_dtype}", watched.seen - before, watched.under_way))
    return counts


def test_every_message_has_arrived_when_a_transfer_is_over() -> None:
    """Those sent as well, so that the tensor may be overwritten."""
    steps = {"reduce_scatter torch.float32": 4, "all_reduce torch.float32": 0, "all_gather torch.float32": 4}
    steps |= {"reduce_scatter torch.bfloat16": 2, "all_reduce torch.bfloat16": 4, "all_gather torch.bfloat16": 4}
    expected = [(name, 2 * 2 * count, 0) for name, count in steps.items()]  # to and from two peers
    assert run_ranks(_count_messages, 3) == [expected] * 3


def _written_by_this_process() -> int:
    """Bytes that went into write and writev: gloo sends with the latter."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))
    return int(line.split()[1])


def starters(group: dist.ProcessGroup, comm_dtype: torch.dtype) -> dict[Transfer, "partial[Pending]"]:
    return {
        "reduce_scatter": partial(bucket_reduce_scatter, group=group, comm_dtype=comm_dtype),
        "all_reduce": partial(bucket_all_reduce, group=group, comm_dtype=comm_dtype),
        "all_gather": partial(bucket_all_gather, group=group),
    }


def _send_counted(context: ParallelContext, elements: int) -> dict[tuple[Transfer, torch.dtype, torch.dtype], int]:
    """Bytes beyond the formula."""
    group, beyond = group_of(context), {}
    for dtype, comm_dtype in TYPES:
        for name, start in starters(group, comm_dtype).items():
            tensor = numbers(context.rank, elements, dtype)
            dist.barrier(group=group)
            before = _written_by_this_process()
            start(tensor).wait()
            expected = (group.size() - 1) * (elements // group.size()) * (2 if name == "all_reduce" else 1)
            expected *= (dtype if name == "all_gather" else comm_dtype).itemsize
            beyond[name, dtype, comm_dtype] = _written_by_this_process() - before - expected
    return beyond


@needs_proc
@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_is_sent_is_what_the_formula_says(n: int) -> None:
    for beyond in run_ranks(_send_counted, n, n * 30_000):
        assert all(0 <= headers <= 3000 for headers in beyond.values()), beyond


def _take_room(context: ParallelContext, elements: int, staging: int) -> dict[str, int]:
    """Bytes that a transfer has beside its tensor, at most."""
    collectives.STAGING_BYTES, collectives.CHUNK_BYTES = staging, staging // 4
    group, peaks = group_of(context), {}
    for comm_dtype in (F32, BF16):
        for name, start in starters(group, comm_dtype).items():
            tensor = torch.ones(elements)
            with LiveBytes([tensor]) as live:
                start(tensor).wait()
            peaks[f"{name} {comm_dtype}"] = live.peak
    return peaks


@pytest.mark.parametrize("n", [2, 4])
def test_a_transfer_holds_no_copy_of_the_bucket(n: int) -> None:
    elements, staging = n << 14, 1 << 14  # of the bucket that is an eighth, or less
    for peaks in run_ranks(_take_room, n, elements, staging):
        narrow = peaks.pop("all_reduce torch.bfloat16")
        assert narrow <= staging + BF16.itemsize * elements, "one copy of what travels"
        assert all(peak <= staging for peak in peaks.values()), peaks
        assert peaks["reduce_scatter torch.float32"] > 0
        assert peaks["all_gather torch.float32"] == 0


def _drop(context: ParallelContext) -> bool:
    """Whether the bucket of a rank that drops a gather stays as it is when the other rank sends."""
    group = dist.new_group(list(range(context.world_size)))
    bucket = torch.full((1 << 18,), float(context.rank))
    if context.rank == 0:
        bucket_all_gather(bucket, group)  # and nobody holds it
    context.barrier()
    pending = bucket_all_gather(bucket, group) if context.rank == 1 else None
    time.sleep(0.2)
    context.barrier()
    del pending
    return bool((bucket == context.rank).all())


def test_a_pending_that_is_dropped_touches_nothing_afterwards() -> None:
    assert run_ranks(_drop, 2)[0]


def _wait_for_nobody(context: ParallelContext) -> float:
    context.set_timeout(1)
    if context.rank == 1:
        time.sleep(2.5)
        return 0
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="imed out"):
        bucket_reduce_scatter(torch.ones(1 << 16), group_of(context), comm_dtype=F32).wait()
    return time.monotonic() - begin


def test_a_rank_that_never_joins_is_an_error_after_the_timeout_of_the_moment() -> None:
    assert 0.9 < run_ranks(_wait_for_nobody, 2)[0] < 2


def _die_after_sending(size: int) -> None:
    before = _written_by_this_process()
    while _written_by_this_process() - before < size:
        time.sleep(1e-4)
    os.kill(os.getpid(), signal.SIGKILL)


def _transfer_for_ever(start: Callable[[Tensor], Pending], tensor: Tensor) -> None:
    while True:
        start(tensor).wait()


def _lose_a_rank(context: ParallelContext, name: Transfer) -> float:
    """Rank 1 dies when it has sent a part of its slice."""
    start = starters(group_of(context), BF16 if name == "all_reduce" else F32)[name]
    tensor = torch.ones(1 << 23)
    context.barrier()
    if context.rank == 1:
        threading.Thread(target=_die_after_sending, args=(1 << 20,), daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        _transfer_for_ever(start, tensor)
    return time.monotonic() - begin


@needs_proc
@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce", "all_gather"])
def test_the_death_of_a_rank_in_mid_transfer_is_an_error_at_once(name: Transfer) -> None:
    """Long before the group's timeout, twice that of run_ranks."""
    assert run_ranks(_lose_a_rank, 2, name, may_die=[1], timeout=20)[0] < 10


@pytest.mark.gpu
def test_nccl_transfers_in_place_and_rounds_what_travels(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        device = torch.device("cuda", 0)
        group = dist.new_group([0], backend="nccl", device_id=device)
        expected = numbers(0, 1 << 20, F32).to(device)
        for comm_dtype in (F32, BF16):
            for name, start in starters(group, comm_dtype).items():
                tensor = expected.clone()
                start(tensor).wait()
                rounded = expected if name == "all_gather" else expected.to(comm_dtype).to(F32)
                assert torch.equal(tensor, rounded), f"{name} {comm_dtype}"
    finally:
        dist.destroy_process_group()
