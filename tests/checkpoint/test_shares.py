"""Each rank writes and reads its own share, whatever layout wrote the files; counted by the kernel."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.manifest import Piece
from megalite.checkpoint.reading import newest
from megalite.checkpoint.store import save
from megalite.launch.context import ParallelContext
from tests.checkpoint.samples import SINGLE, blank, cut, equal, flat_shards, no_report, whole
from tests.ranks import run_ranks

COUNTERS = Path("/proc/self/io")
needs_counters = pytest.mark.skipif(not COUNTERS.exists(), reason="the kernel does not count bytes per process here")


def large_and_small() -> dict[str, Tensor]:
    """One tensor that outweighs the others, and a long tail: whole tensors are no even shares."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"embedding": (1500, 700), **{f"blocks.{i}.weight": (90, 700) for i in range(4)}, "norm": (700,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def counted(name: str) -> int:
    """Bytes that this process has read (rchar) or written (wchar) by system calls, cached or not."""
    lines = dict(line.split(": ") for line in COUNTERS.read_text().splitlines())
    return int(lines[name])


def bytes_of(pieces: list[Piece]) -> int:
    return sum(piece.tensor.nbytes for piece in pieces)


def save_share(context: ParallelContext, folder: Path, layout: str = "flat") -> tuple[int, int]:
    """Bytes of this rank's pieces, and bytes that it wrote."""
    pieces = cut(layout, large_and_small(), context.rank, context.world_size)
    before = counted("wchar")
    save(folder, 1, pieces, {}, context, keep=1)
    return bytes_of(pieces), counted("wchar") - before


def read_share(context: ParallelContext, folder: Path) -> tuple[int, int]:
    """Bytes of this rank's pieces, and bytes that it read to fill them."""
    expected = flat_shards(large_and_small(), context.rank, context.world_size)
    pieces = blank(expected)
    found = newest(folder, context, no_report)
    assert found is not None
    context.barrier()
    before = counted("rchar")
    found.read_into(pieces)
    count = counted("rchar") - before
    assert equal(pieces, expected)
    return bytes_of(pieces), count


@needs_counters
def test_each_rank_writes_its_own_pieces(tmp_path: Path) -> None:
    for own, written in run_ranks(save_share, 4, tmp_path):
        assert own < written < 1.05 * own


@needs_counters
def test_what_all_ranks_hold_is_written_once_and_by_several_of_them(tmp_path: Path) -> None:
    found = run_ranks(save_share, 4, tmp_path, "replicas")
    assert found[0][0] < sum(written for _, written in found) < 1.05 * found[0][0]
    assert min(written for _, written in found) > 90 * 700 * 4


@needs_counters
@pytest.mark.parametrize("writers", [4, 3, 1])
def test_each_rank_reads_its_own_pieces(tmp_path: Path, writers: int) -> None:
    """Of what the same layout wrote, of what another one wrote, and of whole tensors."""
    if writers == 1:
        save(tmp_path, 1, whole(large_and_small()), {}, SINGLE, keep=1)
    else:
        run_ranks(save_share, writers, tmp_path)
    for own, read in run_ranks(read_share, 4, tmp_path):
        assert own < read < 1.05 * own
