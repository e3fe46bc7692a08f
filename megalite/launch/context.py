"""Holds this rank's place in the world, its coordinates and its process groups, and lets all ranks fail together.

There is no global. A layer, an optimizer or a checkpoint is given the group it works on, `context.group("tp")`, by the
names of layout/ranks.py. A group of one rank is None: nothing is sent. (torch takes None for the whole world, so ask
before the call.) Problems, flags and JSON go over `control_group`, a gloo group of the whole world even on GPUs. Where
no group is made yet, or one may hang, ranks leave words in the `store`, where they have met. Nothing is pickled.
"""

import faulthandler
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from megalite.errors.problems import Problem, UserError
from megalite.layout.ranks import GroupNeeds, GroupSpec, ParallelLayout, groups_of

T = TypeVar("T")
CPU = torch.device("cpu")
# Public since torch 2.14, where the name before warns.
set_group_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else distributed_c10d._set_pg_timeout
ABORT_S = 20.0  # for NCCL, after a failure
LONGEST_PAUSE_S = 0.5  # between two questions to the store


@dataclass(frozen=True)
class ParallelContext:
    """One rank of a layout. Made by `startup.join`; the defaults are a single process on the CPU."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    rank: int = 0
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    specs: Mapping[str, GroupSpec] = field(default_factory=lambda: groups_of(ParallelLayout(), 0, GroupNeeds()))
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)  # those of more than one rank
    control_group: dist.ProcessGroup | None = None  # torch's world; None: a world of one
    store: Store | None = None  # where the ranks met; it outlives the groups

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """Position of this rank along every axis."""
        return self.layout.coordinates(self.rank)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The communicator of the group called `name`; None where it has this rank alone, or not this rank."""
        assert name in self.specs, f"no group {name!r} among {', '.join(self.specs)}"
        return self.groups.get(name)

    def members(self, name: str) -> tuple[int, ...]:
        """Global ranks of the group, or along axes ("tp-dp"), ascending; empty where this rank is in no such group."""
        return self.specs[name].ranks if name in self.specs else tuple(self.layout.group_of(self.rank, name))

    def size(self, name: str) -> int:
        """Number of ranks in the group."""
        return len(self.members(name))

    def index(self, name: str) -> int:
        """Position of this rank in the group: its rank there."""
        return self.members(name).index(self.rank)

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value` on every rank, carried as JSON. The others' argument is not looked at."""
        if self.control_group is None:
            return json.loads(json.dumps(value))
        carrier = self._padded(json.dumps(value) if self.rank == 0 else "")
        dist.broadcast(carrier, src=0, group=self.control_group)
        return json.loads(carrier.numpy().tobytes())

    def gather_json(self, value: list[Any], *, to_first: bool = False) -> list[list[Any]]:
        """Every rank's list, by rank; `to_first`: none on other ranks than 0, which long lists would burden. Costs one
        small all-reduce where all lists are empty, the usual case."""
        if self.control_group is None:
            return [value]
        padded = self._padded(json.dumps(value))
        if len(padded) == len("[]"):
            return [[] for _ in range(self.world_size)]
        gathered = [torch.empty_like(padded) for _ in range(self.world_size if self.rank == 0 or not to_first else 0)]
        if to_first:
            dist.gather(padded, gathered or None, dst=0, group=self.control_group)
        else:
            dist.all_gather(gathered, padded, group=self.control_group)
        return [json.loads(of_rank.numpy().tobytes()) for of_rank in gathered]

    def _padded(self, text: str) -> torch.Tensor:
        """The JSON text, with blanks up to the length of the longest of all ranks."""
        longest = torch.tensor(len(text))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.control_group)
        return torch.frombuffer(bytearray(text.ljust(int(longest)), "ascii"), dtype=torch.uint8)

    def barrier(self, *, patient: bool = False) -> None:
        """Return once all ranks have called it. `patient`: a rank may come later than parallel.timeout_s."""
        if self.control_group is not None:
            options = dist.BarrierOptions()
            options.timeout = timedelta(days=365) if patient else options.timeout
            self.control_group.barrier(options).wait()

    def set_timeout(self, seconds: float) -> None:
        """From now on, a collective of any of this rank's groups that a member does not join within this time fails."""
        if self.control_group is not None:
            for group in {*self.groups.values(), self.control_group}:
                set_group_timeout(timedelta(seconds=seconds), group)

    def close(self, *, failed: bool = False) -> None:
        """Leave all groups; calling it again does nothing. A rank that `failed` waits for no partner: NCCL's work is
        aborted, all communicators in one group of NCCL, since aborts one by one can wait for each other
        (pytorch#119797). Where even that hangs, Python's lock held or not, a thread of C ends the process."""
        if self.control_group is None or not dist.is_initialized():
            return
        by_nccl = {group for name, group in self.groups.items() if self.specs[name].traffic != "saving"}
        if failed and self.device.type == "cuda" and by_nccl:
            faulthandler.dump_traceback_later(ABORT_S, exit=True)
            nccl: Any = next(iter(by_nccl))._get_backend(self.device)  # torch has no public name for NCCL's group
            nccl._group_start()
            for group in by_nccl:
                group.abort()
            nccl._group_end()
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


class StorageFailure(Exception):  # noqa: N818  # its callers turn it into an error for people
    """Some rank's storage failed: what happened and where, the same text on every rank."""


def all_ranks_or_raise(context: ParallelContext, action: Callable[[], T], *, patient: bool = False) -> T:
    """The result of `action` on this rank, or an error on all ranks if any rank's failed, once all have finished it:
    one UserError with the problems of all ranks, or one StorageFailure for OSErrors. Anything else is a bug: it keeps
    its type, and is a RuntimeError on the other ranks. `patient`: the action may take longer than parallel.timeout_s.
    """
    result, words = None, list[Any]()
    failure: Exception | None = None
    try:
        result = action()
    except UserError as error:
        failure, words = error, ["input", [problem.as_json() for problem in error.problems]]
    except OSError as error:
        failure, place = error, f" ({error.filename})" if error.filename else ""
        words = ["storage", f"{error.strerror or error}{place}"]
    except Exception as error:
        failure, words = error, ["bug", f"{type(error).__name__}: {error}"]
    if patient:
        context.barrier(patient=True)
    failed = [(rank, *entry) for rank, entry in enumerate(context.gather_json(words)) if entry]
    if not failed:
        return result  # type: ignore[return-value]  # no rank's action has failed
    if bugs := [f"{message} on rank {rank}" for rank, kind, message in failed if kind == "bug"]:
        raise failure if failure and words[0] == "bug" else RuntimeError(bugs[0])
    if refused := [each for _, kind, problems in failed if kind == "input" for each in problems]:
        raise UserError(list(dict.fromkeys(Problem(**fields) for fields in refused)))
    raise StorageFailure("; ".join(f"{message} on rank {rank}" for rank, _, message in failed[:3])) from failure


def rank0_broadcast(context: ParallelContext, action: Callable[[], Any], *, patient: bool = False) -> Any:
    """The JSON value that `action` returns on rank 0, which alone performs it, or the same failure on every rank."""
    value = all_ranks_or_raise(context, lambda: action() if context.rank == 0 else None, patient=patient)
    return context.broadcast_object(value)


def pauses(limit_s: float) -> Iterator[None]:
    """Moments to ask the store for news, until the time is over: many at first, then fewer, since all ranks ask."""
    deadline, pause_s = time.monotonic() + limit_s, 0.005
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        yield


def answers(
    store: Store, ranks: Sequence[int], within_s: float, over: Callable[[], bool] = lambda: False
) -> dict[int, Any]:
    """The JSON that `ranks` have left under their numbers, by rank, once all have or the time is `over`."""
    any(over() or store.check([str(rank) for rank in ranks]) for _ in pauses(within_s))
    return {rank: json.loads(store.get(str(rank))) for rank in ranks if store.check([str(rank)])}


def listed(ranks: Sequence[int | str]) -> str:
    """The first few of many ranks or hosts, in words."""
    return ", ".join([*map(str, ranks[:8]), *(["..."] if len(ranks) > 8 else [])])
