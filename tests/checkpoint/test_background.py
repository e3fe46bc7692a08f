"""A save behind the training: what is written is the state at its beginning, and nothing waits for the disk."""

import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megalite.checkpoint.manifest import Piece
from megalite.checkpoint.store import BackgroundSaves, Saved, save
from megalite.launch.context import ParallelContext
from tests.checkpoint.samples import SINGLE, equal, values, whole


def test_the_stall_is_the_copy_and_not_the_write(tmp_path: Path) -> None:
    def write(pieces: Sequence[Piece], context: ParallelContext) -> Saved:
        time.sleep(0.5)
        return save(tmp_path, 1, pieces, {}, context, keep=1)

    saved = BackgroundSaves(SINGLE).begin(whole(values(1)), write, begun=time.perf_counter() - 2.0).result()
    assert 2.0 < saved.stall_s < saved.seconds - 0.5, "what came before, such as the wait for another save, is stall"
    synchronous = save(tmp_path, 2, whole(values(1)), {}, SINGLE, keep=1)
    assert synchronous.stall_s == synchronous.seconds


def test_the_copies_go_with_the_write(tmp_path: Path) -> None:
    """Though the outcome is kept until somebody asks for it."""
    copies: list[weakref.ref[torch.Tensor]] = []

    def write(pieces: Sequence[Piece], context: ParallelContext) -> Saved:
        copies.extend(weakref.ref(piece.tensor) for piece in pieces)
        return save(tmp_path, 1, pieces, {}, context, keep=1)

    pending = BackgroundSaves(SINGLE).begin(whole(values(1)), write, begun=time.perf_counter())
    pending.result()
    assert len(copies) == len(values(1))
    assert [copy for copy in copies if copy() is not None] == []


LEAVE = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from megalite.checkpoint.store import BackgroundSaves
from megalite.layout.ranks import GroupNeeds
from megalite.layout.ranks import ParallelLayout
from megalite.launch.context import ParallelContext
from megalite.launch.startup import join
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
needs = GroupNeeds(background_saving=True)
context = join(ParallelContext(ParallelLayout(dp=2), rank, store=store), timeout_s=600, needs=needs)
context.barrier()
if rank == 0:
    def write(pieces, its):
        its.barrier()  # the other rank never comes
    BackgroundSaves(context).begin([], write, begun=0.0)
    time.sleep(0.5)
    context.close()
    print("left", flush=True)
else:
    sys.stdin.read()
"""


def test_an_end_that_does_not_wait_is_not_held_up(tmp_path: Path) -> None:
    """As after a third Ctrl-C: the thread sits in a collective that the other rank, alive, never joins."""
    command = [sys.executable, "-c", LEAVE]
    arguments = {"text": True, "stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    first, second = (subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **arguments) for rank in (0, 1))  # type: ignore[call-overload]
    try:
        output, errors = first.communicate(timeout=120)
        assert second.poll() is None
    finally:
        first.kill()
        second.kill()
        second.communicate()
    assert (first.returncode, output, errors) == (0, "left\n", "")


def test_copies_are_contiguous_and_of_every_dtype() -> None:
    columns = torch.arange(30.0).view(5, 6)[:, 1:4]
    pieces = [*whole(values(1)), Piece("columns", (5, 3), (0, 0), columns), Piece("empty", (0,), (0,), torch.zeros(0))]
    copies, wait = BackgroundSaves(SINGLE).copies_of(pieces)
    wait()
    assert equal(copies, pieces)
    assert all(copy.tensor.is_contiguous() for copy in copies)
    for copy in copies:
        copy.tensor.zero_()
    assert columns.sum() > 0, "no copy is the original"


def test_pinned_memory_is_given_back_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA copies to and from the pages that were there, whatever lies at that address by now."""
    blocks: list[weakref.ref[torch.Tensor]] = []
    given_back: list[tuple[int, bool]] = []
    empty = torch.empty

    def remember(*sizes: int, **options: Any) -> torch.Tensor:
        blocks.append(weakref.ref(block := empty(*sizes, **options)))
        return block

    runtime = SimpleNamespace(
        cudaHostRegister=lambda place, size, flags: 0,
        cudaHostUnregister=lambda place: given_back.append((place, blocks[0]() is not None)),
    )
    monkeypatch.setattr(torch, "empty", remember)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    saves = BackgroundSaves(SINGLE)
    places = [pinned.data_ptr() for pinned in saves._pin(list(values(1).values()))]
    assert (given_back, blocks[0]() is None) == ([], False)
    del saves
    assert (given_back, blocks[0]()) == ([(places[0], True)], None)
    monkeypatch.setattr(torch.cuda, "check_error", Mock(side_effect=RuntimeError("no more memory may be locked")))
    saves, live = BackgroundSaves(SINGLE), list(values(1).values())
    assert [copy.shape for copy in saves._pin(live)] == [tensor.shape for tensor in live]
    del saves
    assert len(given_back) == 1, "what was not pinned is not given back"


@pytest.mark.gpu
def test_on_a_gpu_the_stream_waits_and_the_host_does_not() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    live = [torch.full((1 << 26,), 1.0, device=device), torch.full((1000, 1000), 1.0, device=device).t()[:, 5:]]
    pieces = [Piece(f"t{i}", tuple(tensor.shape), (0,) * tensor.dim(), tensor) for i, tensor in enumerate(live)]
    host = BackgroundSaves(ParallelContext(device=device))
    places = set()
    for value in (2.0, 3.0):
        torch.cuda._sleep(int(1e9))  # the state is not there yet
        for tensor in live:
            tensor.fill_(value)
        begun = time.perf_counter()
        copies, wait = host.copies_of(pieces)
        host.before_change()
        for tensor in live:
            tensor.fill_(-1)
        if value == 3.0:  # the first one allocates
            assert time.perf_counter() - begun < 0.1
        wait()
        assert all(bool((copy.tensor == value).all()) for copy in copies)
        assert all(copy.tensor.is_pinned() for copy in copies)
        places.add(tuple(copy.tensor.data_ptr() for copy in copies))
    assert len(places) == 1, "allocated once"
    del host
    assert not any(copy.tensor.is_pinned() for copy in copies), (
        "or copies to its memory would go astray once it is freed"
    )
