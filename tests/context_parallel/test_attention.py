"""Ranks that share a sequence compute the attention of one rank that has all of it, and its gradient."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.context_parallel import attention as attention_module
from megalite.context_parallel import exchange as exchange_module
from megalite.context_parallel.attention import context_attention
from megalite.context_parallel.exchange import CpGroups
from megalite.kernels import attention_tile
from megalite.kernels.attention_mask import AttentionMask
from megalite.launch.context import ParallelContext
from megalite.layout import sequence
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.layout.sequence import AttentionPlan, CpShard, causal_plan, document_plan, starts_of
from megalite.tensor_parallel.collectives import TensorGroup
from tests.ranks import run_ranks

LENGTH, BATCH, SIZE = 96, 2, 8
CLOSE = {"rtol": 1e-12, "atol": 1e-13}
DOCUMENTS = {
    "none": None,
    "one token each at the start, one over a cut": [[1] * 20 + [60, 16], [96]],
    "ends at every cut": [[12] * 8, [24, 24, 48]],
    "short": [[5] * 19 + [1], [3] * 32],
    "long": [[90, 6], [7, 80, 9]],
}


@dataclass(frozen=True)
class Case:
    """`alltoall` of the ranks swap heads. `heads` query heads on each of `groups` key-value heads."""

    ring: int = 1
    alltoall: int = 1
    gathers: bool = False
    documents: str = "none"
    groups: int = 4
    heads: int = 1
    width: int = SIZE

    @property
    def size(self) -> int:
        return self.ring * self.alltoall

    def numbers(self) -> Any:
        """[b, s], None without documents."""
        lengths = DOCUMENTS[self.documents]
        return lengths and np.stack([np.repeat(np.arange(len(each)), each) for each in lengths]).astype(np.int32)

    def parts(self) -> list[Tensor]:
        """Queries, keys and values."""
        generator, shape = torch.Generator().manual_seed(3), (LENGTH, BATCH, self.groups)
        sizes = (self.heads, SIZE), (1, SIZE), (1, self.width)
        return [torch.randn(*shape, *size, generator=generator, dtype=torch.float64) for size in sizes]


def whole_attention(*parts: Tensor, documents: Tensor | None) -> Tensor:
    """[s, b, groups, ...] -> [s, b, heads * width] by torch's own function, with the mask written out."""
    queries, keys, values = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in parts)
    mask = torch.ones(len(parts[0]), len(parts[0]), dtype=torch.bool).tril()
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)


def output_gradient(width: int) -> Tensor:
    return torch.randn(LENGTH, BATCH, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def share_of(context: ParallelContext, case: Any, numbers: Any) -> tuple[CpShard, CpGroups, AttentionMask]:
    """A rank's place in sequences [b, s] of these documents (None: of one each), of a case with these ranks."""
    share, plan = CpShard(context.index("cp"), case.ring, case.alltoall), None
    if case.ring > 1:
        plan = causal_plan(share, LENGTH) if numbers is None else document_plan(share, starts_of(numbers))
    documents = None if numbers is None else torch.from_numpy(numbers)
    groups = (TensorGroup.of(context.group(name)) for name in ("cp-alltoall", "cp-ring"))
    return share, CpGroups(*groups, gathers=case.gathers), AttentionMask(documents=documents, plan=plan)


def compute(context: ParallelContext, case: Case) -> tuple[list[int], Tensor, list[Tensor]]:
    """This rank's places, and its part of the output and of the gradients."""
    share, ranks, mask = share_of(context, case, case.numbers())
    cut = mask.plan.cut if mask.plan else "zigzag"
    places = share.places(LENGTH, cut).tolist()
    parts = [part[places].requires_grad_() for part in case.parts()]
    whole = partial(whole_attention, documents=mask.documents)
    out = context_attention(*parts, ranks=ranks, mask=mask, whole=whole)  # type: ignore[call-arg]
    out.backward(output_gradient(case.groups * case.heads * case.width)[places])
    return places, out.detach(), [part.grad for part in parts]


def run(case: Case, function: Any = compute) -> None:
    layout, needs = ParallelLayout(cp=case.size), GroupNeeds(context_ring=case.ring)
    numbers, parts = case.numbers(), [part.requires_grad_() for part in case.parts()]
    expected = whole_attention(*parts, documents=None if numbers is None else torch.from_numpy(numbers))
    expected.backward(output_gradient(case.groups * case.heads * case.width))
    seen = []
    for places, out, grads in run_ranks(function, case.size, case, layout=layout, needs=needs):
        torch.testing.assert_close(out, expected.detach()[places], **CLOSE)
        for grad, part in zip(grads, parts, strict=True):
            torch.testing.assert_close(grad, part.grad[places], **CLOSE)
        seen += places
    assert sorted(seen) == list(range(LENGTH)), "every place is on one rank"


CASES = [
    Case(ring=2),
    Case(ring=3, heads=2),
    Case(ring=3, gathers=True, groups=1, heads=2),
    Case(alltoall=2, documents="short"),
    Case(alltoall=4, groups=2, heads=4),
    Case(ring=2, alltoall=2, heads=2),
    Case(ring=2, documents="short"),
    Case(ring=3, gathers=True, documents="short", width=4),
    Case(alltoall=2, width=12, heads=2),
    *(Case(ring=3, gathers=True, documents=name, heads=2) for name in DOCUMENTS if name != "none"),
]
LONG_CASES = [
    *(
        Case(ring, alltoall, gathers, documents, groups=2, heads=2)
        for ring, alltoall in ((2, 1), (3, 1), (4, 1), (2, 2), (1, 2))
        for gathers in (False, True)
        for documents in DOCUMENTS
    ),
    Case(alltoall=3, groups=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_attend_like_one(case: Case) -> None:
    run(case, compute_in_small_tiles)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_ranks_attend_like_one_in_every_way(case: Case) -> None:
    run(case, compute_in_small_tiles)


def compute_in_small_tiles(context: ParallelContext, case: Case) -> Any:
    sequence.QUERIES = 8
    return compute(context, case)


def masked_rows_merged(context: ParallelContext, case: Case) -> Any:
    """A row that sees no key of a tile keeps the log-sum-exp 0 that torch's kernel gives it."""
    attend = attention_module.attend

    def merged(*parts: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*parts, **how)
        return out, lse.nan_to_num(neginf=0.0)

    attention_module.attend = merged
    return compute_in_small_tiles(context, case)


def key_gradients_to_the_wrong_rank(context: ParallelContext, case: Case) -> Any:
    gradient = CpGroups.gradient

    def shifted(self: CpGroups, own: Tensor, plan: AttentionPlan, gradient_of: Any) -> Tensor:
        return exchange_module.finish(self._pass_on(gradient(self, own, plan, gradient_of)))

    CpGroups.gradient = shifted  # type: ignore[method-assign]
    return compute_in_small_tiles(context, case)


def no_sum_of_key_gradients(context: ParallelContext, case: Case) -> Any:
    CpGroups.gradient = (  # type: ignore[method-assign]
        lambda self, own, plan, gradient_of: next(iter([gradient_of(*each) for each in self.blocks(own, plan)]))
    )
    return compute_in_small_tiles(context, case)


def documents_forgotten(context: ParallelContext, case: Case) -> Any:
    masked = attention_module._Tiles.mask
    attention_module._Tiles.mask = lambda self, tile, source: (
        torch.ones_like(mask) if (mask := masked(self, tile, source)) is not None else None
    )  # type: ignore[method-assign]
    return compute_in_small_tiles(context, case)


def own_log_sum_exp_in_backward(context: ParallelContext, case: Case) -> Any:
    """Backward takes the statistics of a tile for those of all keys."""
    backward = attention_tile.attend_backward

    def local(grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, **how: Any) -> Any:
        out, lse = attention_tile.attend(queries, keys, values, **how)
        return backward(grad, queries, keys, values, out, lse, **how)

    attention_module.attend_backward = local
    return compute_in_small_tiles(context, case)


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (masked_rows_merged, Case(ring=2, documents="short")),
        (key_gradients_to_the_wrong_rank, Case(ring=3)),
        (no_sum_of_key_gradients, Case(ring=2, gathers=True)),
        (documents_forgotten, Case(ring=2, documents="long")),
        (own_log_sum_exp_in_backward, Case(ring=2)),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_broken_exchange_is_caught(mutant: Any, case: Case) -> None:
    with pytest.raises(AssertionError):
        run(case, mutant)
