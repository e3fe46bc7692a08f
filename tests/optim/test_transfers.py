"""Sums and gathers of buckets between real ranks: right, whatever else is under way, and as many bytes as promised."""

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.optim.zero import Transfer, bucket_all_gather, bucket_all_reduce, bucket_reduce_scatter
from tests.ranks import run_ranks
from tests.tensor_parallel.live_bytes import LiveBytes

needs_proc = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="asks Linux how much a process has sent")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TYPES = [(F32, F32), (F64, F64), (F32, BF16), (F32, F16), (F64, BF16), (BF16, BF16)]  # of the tensor, of what travels
Case = tuple[int, torch.dtype, torch.dtype]
CASES: list[Case] = [(length, *types) for length in (1, 37, 30_000) for types in TYPES]  # length per rank


def numbers(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What that rank has, over many magnitudes, so that another order of adding shows: any rank knows it."""
    generator = torch.Generator().manual_seed(97 * seed + rank)
    signed = torch.randn(length, dtype=F64, generator=generator)
    return (signed * 2.0 ** torch.randint(-8, 9, (length,), generator=generator)).to(dtype)


def group_of(context: ParallelContext) -> dist.ProcessGroup:
    group = context.group("dp-cp")
    assert group is not None
    return group


def starters(group: dist.ProcessGroup, comm_dtype: torch.dtype) -> dict[str, Callable[[Tensor], Transfer]]:
    return {
        "reduce_scatter": partial(bucket_reduce_scatter, group=group, comm_dtype=comm_dtype),
        "all_reduce": partial(bucket_all_reduce, group=group, comm_dtype=comm_dtype),
        "all_gather": partial(bucket_all_gather, group=group),
    }


def wrong_cases(context: ParallelContext, backend: str) -> list[tuple[str, Case]]:
    """The cases in which a transfer, as it is done on `backend`, is not right."""
    dist.get_backend = lambda group: backend
    group, n, me = group_of(context), context.world_size, context.rank
    wrong = []
    for case in CASES:
        length, dtype, comm_dtype = case
        terms = [numbers(rank, n * length, dtype) for rank in range(n)]
        carried = torch.stack([term.to(comm_dtype).to(F64) for term in terms])
        # Each of n - 1 sums is rounded once, in the dtype that travels.
        allowed = n * torch.finfo(comm_dtype).eps * carried.abs().sum(0)
        bits = {}
        for name, start in starters(group, comm_dtype).items():
            tensor = terms[me].clone()
            start(tensor).wait()
            own = slice(me * length, (me + 1) * length) if name == "reduce_scatter" else slice(None)
            expected = torch.cat([term.chunk(n)[rank] for rank, term in enumerate(terms)]) if "ga" in name else None
            if expected is not None:
                fine = torch.equal(tensor, expected)
            else:
                fine = bool(((tensor.to(F64) - carried.sum(0)).abs() <= allowed)[own].all())
            bits[name] = tensor
            wrong += [] if fine else [(name, case)]
        others = [torch.empty_like(bits["all_reduce"]) for _ in range(n)]
        dist.all_gather(others, bits["all_reduce"], group=group)
        wrong += [] if all(torch.equal(bits["all_reduce"], other) for other in others) else [("bits differ", case)]
    return wrong


@pytest.mark.parametrize(("n", "backend"), [(2, "gloo"), (3, "gloo"), (4, "gloo"), (2, "nccl")])
def test_sums_and_gathers_are_right(n: int, backend: str) -> None:
    """On gloo, and by the collectives that NCCL has, here on gloo too. An all-reduce gives all ranks the same bits."""
    assert run_ranks(wrong_cases, n, backend) == [[]] * n


def _transfer_much(context: ParallelContext, seed: int) -> tuple[bool, list[bytes]]:
    """Sums, gathers and torch's own small collectives at once, with naps that are others on every rank."""
    group, n, me = group_of(context), context.world_size, context.rank
    naps = random.Random(f"{seed} {me}")
    transfers: list[tuple[Tensor, Transfer]] = []
    gathers: list[tuple[Tensor, Tensor, Transfer]] = []
    fine = True
    for number, length in enumerate((4000, 300, 20000, 4000, 1, 4000)):
        bucket, everywhere = (numbers(me, n * length, F64, seed=sign * number) for sign in (1, -1))
        comm_dtypes = ((F64, BF16)[number % 2], (BF16, F64)[number % 2])
        transfers.append((bucket, bucket_reduce_scatter(bucket, group, comm_dtype=comm_dtypes[0])))
        time.sleep(naps.uniform(0, 0.003))
        count = torch.tensor(me + 1)
        dist.all_reduce(count, group=group)
        fine = fine and int(count) == n * (n + 1) // 2
        whole = numbers(0, n * length, F32, seed=number)
        spread = torch.full_like(whole, torch.nan)
        spread.chunk(n)[me].copy_(whole.chunk(n)[me])
        gathers.append((spread, whole, bucket_all_gather(spread, group)))
        transfers.append((everywhere, bucket_all_reduce(everywhere, group, comm_dtype=comm_dtypes[1])))
    naps.shuffle(gathers)
    for found, expected, transfer in gathers:
        transfer.wait()
        fine = fine and torch.equal(found, expected)
    for _, transfer in transfers:
        transfer.wait()
    results = [*(tensor.chunk(n)[me] for tensor, _ in transfers[::2]), *(tensor for tensor, _ in transfers[1::2])]
    return fine, [result.numpy().tobytes() for result in results]


@pytest.mark.parametrize("n", [2, 3])
def test_transfers_and_other_collectives_may_be_under_way_at_once(n: int) -> None:
    first, second = (run_ranks(_transfer_much, n, seed) for seed in (1, 2))
    assert all(fine for fine, _ in first + second)
    assert first == second, "timing changed a sum"
    assert len({tuple(results[6:]) for _, results in first}) == 1, "an all-reduce differs between ranks"


def _written_by_this_process() -> int:
    """Bytes that went into write and writev: gloo sends with the latter."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))
    return int(line.split()[1])


def _sent_and_held(context: ParallelContext, elements: int) -> list[tuple[str, torch.dtype, torch.dtype, float, int]]:
    """For each transfer, the bytes that it sends by those of a ring, and the bytes that it has beside its tensor."""
    group, n, found = group_of(context), context.world_size, []
    for dtype, comm_dtype in TYPES:
        for name, start in starters(group, comm_dtype).items():
            tensor = numbers(context.rank, elements, dtype)
            dist.barrier(group=group)
            before = _written_by_this_process()
            with LiveBytes([tensor]) as live:
                start(tensor).wait()
            sent = _written_by_this_process() - before
            ring = (n - 1) * (elements // n) * (dtype if name == "all_gather" else comm_dtype).itemsize
            found.append((name, dtype, comm_dtype, sent / ring, live.peak))
    return found


@needs_proc
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_transfer_sends_what_docs_say_and_copies_only_what_is_narrowed(n: int) -> None:
    elements = n * 30_000
    for name, dtype, comm_dtype, sent, held in (
        each for found in run_ranks(_sent_and_held, n, elements) for each in found
    ):
        expected = {"reduce_scatter": 1 + 1 / n, "all_reduce": 2, "all_gather": 1}[name]
        assert expected <= sent < expected * 1.05, (name, dtype, comm_dtype, sent)
        assert held == (elements * comm_dtype.itemsize if comm_dtype != dtype and name != "all_gather" else 0)


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
