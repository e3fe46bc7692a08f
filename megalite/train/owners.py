"""Who has the memory when it runs out: what training keeps, by part of the model and kind. All else is activations."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megalite.optim.optimizer import slices_of
from megalite.optim.zero import part_of

if TYPE_CHECKING:
    from megalite.train.build import Training

SHOWN = 10  # owners


def owners(training: "Training") -> Counter[str]:
    """Bytes of this rank by owner (`gradients of blocks.3`), no padding. Masters that are parameters count as these."""
    buffers, found = training.buffers, Counter[str]()
    for name in buffers.places:
        for kind, tensor in (("parameters", buffers.parameter(name)), ("gradients", buffers.gradient(name))):
            found[f"{kind} of {part_of(name)}"] += tensor.nbytes
    masters = [m if m is not p else m[:0] for m, p in zip(buffers.masters, buffers.parameters, strict=True)]
    kept = {"masters": masters, "averages": buffers.averages, **slices_of(training.optimizer.state())}
    for kind, slices in kept.items():
        for each in buffers.owned if slices else ():
            part = slices[each.bucket][each.in_slice.start : each.in_slice.stop]
            found[f"{kind} of {part_of(each.slot.record.name)}"] += part.nbytes
    return found


def memory_lines(training: "Training", allocated: int | None) -> Iterator[str]:
    """The largest owners, and what is left of the `allocated` bytes."""
    found = owners(training)
    if allocated is not None:
        found["activations, workspaces and all else"] = allocated - found.total()
    for owner, size in found.most_common(SHOWN):
        yield f"{size / 2**30:10,.3f} GiB  {owner}"


def write_memory(training: "Training", folder: Path, rank: int, *, cuda: bool) -> Path:
    """Leave a table of owners in a folder and, of a GPU, torch's snapshot beside it, for pytorch.org/memory_viz. While
    the error is handled, the memory is still as it was."""
    path = folder / f"memory-rank-{rank:05d}.txt"
    lines = memory_lines(training, torch.cuda.memory_allocated() if cuda else None)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if cuda:
        torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
    return path
