"""Finds checkpoints and fills live tensors from them, whatever layout wrote them. All ranks call these functions at the
same point, and all get the same outcome.

Names, shapes and dtypes are compared over all ranks before the first tensor is touched: a load that fails half-way
would mix two states, and one that leaves out what nobody asks for would lose state in silence. Each rank then reads,
of each stored box, only the bytes from the first to the last element that it needs.
"""

import errno
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megalite.checkpoint.commit import STATE, committed, step_name, step_of
from megalite.checkpoint.manifest import DTYPES, MANIFEST, Manifest, Piece, StoredBox, StoredTensor, digest, file_fault
from megalite.errors.problems import Problem, UserError, refuse, several
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast

if TYPE_CHECKING:
    from megalite.checkpoint.remote import Remote


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified. Its files are read only by `read_into`."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    context: ParallelContext

    def read_into(self, pieces: Sequence[Piece], *, unread: Callable[[str], bool] = lambda name: False) -> None:
        """Fill the tensors of `pieces`; collective. Tensors whose name is `unread` are left alone on both sides.

        The union of all ranks' pieces must be exactly what was saved: differences in name, shape or dtype are one
        UserError, raised before any tensor is touched. After an OSError the tensors are of no use.
        """
        saved = {name: tensor for name, tensor in self.manifest.tensors.items() if not unread(name)}
        pieces = [piece for piece in pieces if not unread(piece.name)]
        here = {piece.name: (piece.tensor.dtype, [*piece.logical_shape]) for piece in pieces}
        there = {name: (DTYPES[tensor.dtype], [*tensor.shape]) for name, tensor in sorted(saved.items())}
        asked = torch.tensor([name in here for name in there], dtype=torch.uint8)  # [tensors], alike on all ranks
        if self.context.control_group is not None and there:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.context.control_group)
        nobodys = [name for name, count in zip(there, asked.tolist(), strict=True) if not count]
        words = [
            f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
            for name in (*here, *nobodys)
            if there.get(name) != here.get(name)
        ]
        remedy = "use the model, optimizer and precision of the run that wrote it, or another run_dir"
        problem = Problem(str(self.path), several(len(words), "difference"), ", ".join(words[:10]), remedy)
        all_ranks_or_raise(self.context, partial(refuse, [problem] if words else []))
        all_ranks_or_raise(self.context, lambda: _read_all(self.path, saved, pieces))


def newest(
    folder: Path,
    context: ParallelContext,
    report: Callable[[str], None],
    *,
    step: int | None = None,
    look_only: bool = False,
    remote: "Remote | None" = None,
) -> Found | None:
    """The newest checkpoint in `folder` whose every byte is as written, or that of `step`; None if there is none. What
    is not, and complete in a `remote` store, is brought from there.

    Damaged ones that were passed over are renamed, and reported on rank 0. If all are damaged the run is refused, with
    nothing renamed: starting again from nothing is for a person to decide. Readers without the run's lock `look_only`.
    """
    here = rank0_broadcast(context, lambda: [at for at, _ in committed(folder)])
    there = [] if remote is None else rank0_broadcast(context, lambda: remote.asked(remote.complete))
    steps = sorted({*here, *there}, reverse=True)
    others = f"those there are: {', '.join(map(str, reversed(steps))) or 'none, in this run'}"
    if step is not None and step not in steps:
        raise UserError(Problem("step", step, f"there is no checkpoint of it in {folder}", others))
    damaged: list[tuple[Path, str]] = []
    for path in [folder / step_name(at) for at in steps if step in (None, at)]:
        found = inspect(path, context) if step_of(path) in here else ""
        if isinstance(found, str) and remote is not None and step_of(path) in there:
            fault = rank0_broadcast(context, partial(remote.fetch, step_of(path), folder, report), patient=True)
            found = f"{found}{found and '; '}{fault} in {remote.url}" if fault else inspect(path, context)
        if isinstance(found, Found):
            for bad, fault in damaged if context.rank == 0 else []:
                kept = "" if look_only else f"; {set_aside(bad)}" if bad.exists() else ""
                report(f"checkpoint {bad.name} is damaged and was passed over: {fault}{kept}")
                if remote is not None and step_of(bad) in there:
                    remote.set_aside(step_of(bad))
            return found
        damaged.append((path, found))
    remedy = "restore this folder from a copy, or set another run_dir to start from nothing"
    rule, remedy = ("no checkpoint of this run can be read", remedy) if step is None else ("it cannot be read", others)
    refuse([Problem(str(path), "damaged", f"{rule}; {fault}", remedy) for path, fault in damaged])
    return None


def set_aside(bad: Path) -> str:
    """Rename a damaged checkpoint, so that it is not tried again and not lost; what became of it, in words."""
    aside = bad.with_name(f"{bad.name}.bad-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        return f"kept as {bad.rename(aside).name}"
    except OSError as error:
        return f"not renamed: {error.strerror}"


def inspect(path: Path, context: ParallelContext, *, json_only: bool = False) -> Found | str:
    """The checkpoint at `path`, or what is wrong with it; collective. Each rank verifies a part of its files, unless
    `json_only`. UserError where another version of megalite has written it."""

    def look() -> Found | str:
        if path.is_symlink() and not path.exists():
            remedy = "mount its disk, or delete the link to go on from the checkpoint before"
            rule = f"it is a link to {path.readlink()}, and nothing is there"
            raise UserError(Problem("run_dir", str(path), rule, remedy))
        try:
            content, saved = ((path / name).read_bytes() for name in (MANIFEST, STATE))
            manifest, state = Manifest.parse(content, path), json.loads(saved)
        except OSError as error:
            return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{MANIFEST} or {STATE} is damaged: {error}"
        if digest(saved) != manifest.files[STATE][1]:
            return f"{STATE} is damaged"
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))
        mine = [] if json_only else by_size[context.rank :: context.world_size]
        faults = [fault for name in mine if (fault := file_fault(path, name, manifest.files[name][1]))]
        return "; ".join(faults[:3]) or Found(path, manifest, state, context)

    found = all_ranks_or_raise(context, look)
    faults = context.gather_json([found] if isinstance(found, str) else [])
    return "; ".join(dict.fromkeys(fault for of_rank in faults for fault in of_rank)) or found


def _read_all(folder: Path, saved: Mapping[str, StoredTensor], pieces: Sequence[Piece]) -> None:
    by_file: dict[str, list[tuple[StoredBox, Piece, list[range]]]] = defaultdict(list)
    for piece in pieces:
        for box in saved[piece.name].boxes:
            sides = zip(box.offsets, box.sizes, piece.offsets, piece.tensor.shape, strict=True)
            common = [range(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]
            if all(common):
                by_file[box.file].append((box, piece, common))
    for name, parts in sorted(by_file.items()):
        with open(folder / name, "rb") as file:
            for part in sorted(parts, key=lambda part: part[0].start):
                _read(file, *part)


def _read(file: BufferedReader, box: StoredBox, piece: Piece, common: Sequence[range]) -> None:
    """Fill what a stored box and a piece have in `common` from the shortest range of the file that holds all of it."""
    inside = [slice(places.start - at, places.stop - at) for places, at in zip(common, piece.offsets, strict=True)]
    target = piece.tensor.detach()[tuple(inside)]
    strides = [prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]  # of the stored box, in elements
    skipped = sum((at.start - first) * stride for at, first, stride in zip(common, box.offsets, strides, strict=True))
    reach = sum((len(places) - 1) * stride for places, stride in zip(common, strides, strict=True)) + 1
    elements = torch.empty(reach, dtype=target.dtype)
    file.seek(box.start + skipped * target.itemsize)
    if file.readinto(elements.view(torch.uint8).numpy().data) < elements.nbytes:
        raise OSError(errno.EIO, "the file ends too early", file.name)
    target.copy_(elements.as_strided(target.shape, strides))
