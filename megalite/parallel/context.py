"""This rank's place in the world: its coordinates and its process groups, passed to whoever needs them.

There is no global: a layer, an optimizer or a checkpoint is given the group it works on. A group of one rank is None:
no communication (torch takes None for the whole world, so ask before the call). Small host-side traffic (problems,
flags, JSON) goes over `control_group`, a gloo group of the whole world even where tensors travel by NCCL, so that it
never queues behind the accelerator. Nothing is pickled.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megalite.config.problems import Problem, UserError
from megalite.parallel.layout import ParallelLayout

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ParallelContext:
    """One rank of a layout. Made by `startup.start`; the defaults are a single process on the CPU."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    rank: int = 0
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    dp_group: dist.ProcessGroup | None = None  # None: dp == 1
    control_group: dist.ProcessGroup | None = None  # None: a world of one
    meeting: Store | None = None  # where the ranks met; outlives the groups

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def dp_size(self) -> int:
        return self.layout.dp

    @property
    def dp_rank(self) -> int:
        return self.layout.coordinates(self.rank)["dp"]

    def agree(self, problems: Sequence[Problem]) -> None:
        """Raise the same UserError on every rank if any rank has a problem: the union, in order of rank, each once.

        All ranks call it at the same point, those without problems with an empty list.
        """
        everyone: dict[Problem, None] = {}
        for said in self.gather_json([problem_fields(problem) for problem in problems]):
            everyone.update(dict.fromkeys(Problem(**fields) for fields in said))
        if everyone:
            raise UserError(list(everyone))

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value` on every rank, carried as JSON. The others' argument is not looked at."""
        if self.control_group is None:
            return json.loads(json.dumps(value))
        payload = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(payload)])
        dist.broadcast(size, src=0, group=self.control_group)
        carrier = _to_bytes_tensor(payload, int(size))
        dist.broadcast(carrier, src=0, group=self.control_group)
        return json.loads(carrier.numpy().tobytes())

    def barrier(self, *, patient: bool = False) -> None:
        """Return once all ranks have called it.

        `patient`: whatever one of them does first may last longer than parallel.timeout_s. A rank that dies is an error
        at once in either case.
        """
        if self.control_group is not None:
            options = dist.BarrierOptions()
            if patient:
                options.timeout = timedelta(days=365)
            self.control_group.barrier(options).wait()

    def close(self, *, failed: bool = False) -> None:
        """Leave all groups; calling it again does nothing.

        A rank that `failed` waits for no partner: what NCCL still has under way is aborted, not finished.
        """
        if self.control_group is not None and dist.is_initialized():
            if failed and self.dp_group is not None and self.device.type == "cuda":
                self.dp_group.abort()
            dist.destroy_process_group()

    def gather_json(self, value: list[Any]) -> list[list[Any]]:
        """Every rank's list, by rank. Costs one small all-reduce where all lists are empty, the usual case."""
        if self.control_group is None:
            return [value]
        payload = json.dumps(value).encode() if value else b""
        longest = torch.tensor([len(payload)])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.control_group)
        if not int(longest):
            return [[] for _ in range(self.world_size)]
        padded = payload.ljust(int(longest), b" ")  # JSON does not mind trailing blanks
        gathered = [torch.empty(int(longest), dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(gathered, _to_bytes_tensor(padded, int(longest)), group=self.control_group)
        return [json.loads(said.numpy().tobytes().strip() or b"[]") for said in gathered]


def _to_bytes_tensor(payload: bytes, size: int) -> torch.Tensor:
    """A uint8 tensor of `size` that starts with the payload (a receiver has none yet)."""
    carrier = torch.zeros(size, dtype=torch.uint8)
    if payload:
        carrier[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return carrier


def problem_fields(problem: Problem) -> dict[str, Any]:
    """A problem's fields with a value that JSON can carry and that compares equal to its copy on other ranks."""
    fields = asdict(problem)
    if not isinstance(fields["value"], str | int | float | bool | None):
        fields["value"] = str(fields["value"])
    return fields
