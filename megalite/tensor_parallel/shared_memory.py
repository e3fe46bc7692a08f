"""Memory that the ranks of tp share, by which a product sends what it has finished while it computes the rest
(parallel.async_tp): inductor joins products and collectives where a group has it."""

import warnings

import torch
from torch import Tensor

from megalite.errors.problems import shortened
from megalite.tensor_parallel.collectives import TensorGroup

SIZE = 256  # of a product that is tried, in each direction


def share_memory(group: TensorGroup) -> None:
    """From now on inductor may join the group's collectives with products."""
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
