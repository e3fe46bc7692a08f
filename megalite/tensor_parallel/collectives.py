"""The collectives of tensor parallelism, as functions that `torch.compile(fullgraph=True)` can trace.

They are torch's functional collectives, by their ops: the wrappers in Python changed their names between torch 2.11 and
2.13. `start_*` returns a new tensor at once, whose content is there after `finish`; what is computed in between runs
beside the communication. They are not differentiable: mappings.py and linear.py define gradients.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.errors.problems import shortened

_ops = torch.ops._c10d_functional
SIZE = 256  # of a product that is tried, in each direction
NAMED_GATHER_COMPILES = torch.__version__ >= "2.13"


@dataclass(frozen=True)
class TensorGroup:
    """A process group as constants that a compiled graph can hold: its name, its size, this rank's place in it."""

    name: str
    size: int
    index: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "TensorGroup | None":
        """None stays None: no communication."""
        return None if group is None else cls(group.group_name, group.size(), group.rank())


def start_all_reduce(x: Tensor, group: TensorGroup, op: str = "sum") -> Tensor:
    """The sum (or "max") over the ranks."""
    return _ops.all_reduce(x.contiguous(), op, group.name)  # type: ignore[no-any-return]


def start_all_gather(x: Tensor, group: TensorGroup) -> Tensor:
    """Everybody's [n, ...], in order of rank: [t * n, ...]."""
    x = x.contiguous()
    if x.is_cpu and (NAMED_GATHER_COMPILES or not torch.compiler.is_compiling()):
        # Not the op below: gloo's two workers note the name of what they have done without a lock (torch 2.13), and
        # two that write ALLGATHER_COALESCED, too long for a string's own buffer, free it twice. This one is ALLGATHER.
        # torch 2.11 cannot compile it, so that what is compiled there, on CPUs, may still meet that (rarely).
        out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
        return _ops.all_gather_into_tensor_out(x, group.size, group.name, out=out)  # type: ignore[no-any-return]
    return _ops.all_gather_into_tensor(x, group.size, group.name)  # type: ignore[no-any-return]


def start_reduce_scatter(x: Tensor, group: TensorGroup) -> Tensor:
    """This rank's part of the sum: [t * n, ...] -> [n, ...]."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name)  # type: ignore[no-any-return]


def start_all_to_all(x: Tensor, sends: list[int], receives: list[int], group: TensorGroup) -> Tensor:
    """Rows [sum(sends), ...] to the members, so many to each in order of rank; theirs: [sum(receives), ...]."""
    return _ops.all_to_all_single(x.contiguous(), receives, sends, group.name)  # type: ignore[no-any-return]


def finish(x: Tensor) -> Tensor:
    """The tensor, complete."""
    return _ops.wait_tensor(x)  # type: ignore[no-any-return]


def share_memory(group: TensorGroup) -> None:
    """From now on inductor may join the group's collectives with products (parallel.async_tp)."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # torch calls this needless, and inductor (2.11 to 2.13) asks whether it was done
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.name)  # type: ignore[arg-type,unused-ignore]


def why_products_cannot_send(group: TensorGroup, dtype: torch.dtype, device: torch.device) -> str:
    """Tries both products that inductor writes, on whole numbers that every dtype holds; collective. Empty: they do.
    A rank whose device fails leaves the others in it, until parallel.startup_timeout_s is over."""
    try:
        one = torch.ones(SIZE, SIZE, dtype=dtype, device=device)
        own, ranks = one * (group.index + 1), [rank + 1.0 for rank in range(group.size)]
        share_memory(group)
        _, [gathered] = torch.ops.symm_mem.fused_all_gather_matmul(own, [one], 0, group.name)
        scattered = torch.ops.symm_mem.fused_matmul_reduce_scatter(own.repeat(group.size, 1), one, "sum", 0, group.name)
        wanted: list[tuple[Tensor, list[float]]] = [(gathered, ranks), (scattered, [sum(ranks)])]
        for found, factors in wanted:
            expected = torch.cat([one * (factor * SIZE) for factor in factors])
            if not torch.equal(found, expected):
                return f"a product of ones came out as {found.flatten()[:4].tolist()}"
    except Exception as error:  # whatever the driver, the network or torch says
        return f"{type(error).__name__}: {shortened(str(error))}"
    return ""
