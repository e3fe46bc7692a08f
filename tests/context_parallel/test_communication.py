"""What the ranks of a sequence send, counted on real ranks, is what docs/context_parallel.md says, byte for byte; and
what they keep for backward falls as 1/cp."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.config.layout import sent_elements
from megalite.config.schema import Config
from megalite.context_parallel import exchange as exchange_module
from megalite.context_parallel.attention import context_attention
from megalite.launch.context import ParallelContext, pauses
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.tensor_parallel.collectives import TensorGroup
from tests.context_parallel.test_attention import share_of, whole_attention
from tests.ranks import run_ranks

LENGTH, BATCH, GROUPS, HEADS, SIZE = 96, 1, 4, 2, 8
BYTES = 8  # fp64


@dataclass(frozen=True)
class Case:
    ring: int = 1
    alltoall: int = 1
    gathers: bool = False
    document: int = LENGTH  # tokens of each

    @property
    def size(self) -> int:
        return self.ring * self.alltoall


def count(sent: Counter[str]) -> None:
    """From now on, bytes that this rank sends to others, by collective."""

    def counted(name: str, start: Any, outgoing: Any) -> Any:
        def call(x: Tensor, *arguments: Any) -> Tensor:
            sent[name] += outgoing(x, *arguments) * BYTES
            return start(x, *arguments)  # type: ignore[no-any-return]

        return call

    def to_others(x: Tensor, sends: list[int], receives: list[int], group: TensorGroup) -> int:
        others = sum(rows for member, rows in enumerate(sends) if member != group.index)
        return others * x[:1].numel()

    module = exchange_module
    module.start_all_to_all = counted("alltoall", module.start_all_to_all, to_others)
    module.start_all_gather = counted("gather", module.start_all_gather, lambda x, group: x.numel() * (group.size - 1))
    module.start_reduce_scatter = counted(
        "scatter", module.start_reduce_scatter, lambda x, group: x.numel() // group.size * (group.size - 1)
    )


def parts_of(rows: int) -> list[Tensor]:
    """Queries, keys and values."""
    shapes = ((rows, BATCH, GROUPS, heads, SIZE) for heads in (HEADS, 1, 1))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def compute(context: ParallelContext, case: Case) -> tuple[Counter[str], int]:
    """Bytes sent in forward and backward, and elements kept between the two."""
    sent: Counter[str] = Counter()
    count(sent)
    numbers = (np.arange(LENGTH, dtype=np.int32) // case.document)[None] if case.document < LENGTH else None
    _, ranks, mask = share_of(context, case, numbers)
    parts, kept = parts_of(LENGTH // case.size), dict[int, int]()

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // BYTES
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out = context_attention(*parts, ranks, mask, partial(whole_attention, documents=None))  # type: ignore[call-arg, arg-type]
    out.sum().backward()
    return sent, sum(kept.values())


def run(case: Case) -> list[tuple[Counter[str], int]]:
    needs = GroupNeeds(context_ring=case.ring)
    return run_ranks(compute, case.size, case, layout=ParallelLayout(cp=case.size), needs=needs)


@pytest.mark.parametrize(
    "case",
    [
        Case(ring=2),
        Case(ring=3, gathers=True),
        Case(alltoall=2),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (Case(ring=3), Case(ring=2, gathers=True), Case(alltoall=4), Case(ring=2, alltoall=2))
        ),
    ],
    ids=str,
)
def test_ranks_send_what_the_formula_says(case: Case) -> None:
    config = Config()
    config.model.num_attention_heads, config.model.num_key_value_heads = GROUPS * HEADS, GROUPS
    expected = sent_elements(config, case.alltoall, case.ring) * SIZE * LENGTH // case.size * BATCH * BYTES
    assert [sum(sent.values()) for sent, _ in run(case)] == [expected] * case.size


def test_of_packed_documents_only_the_keys_that_are_seen_travel() -> None:
    """Documents of 32 tokens; zigzag of two: pieces of 24. Rank 0 has tokens 0 to 23 and 72 to 95, rank 1 the others:
    rank 1 needs tokens 0 to 23 of the first document, rank 0 tokens 64 to 71 of the third."""
    first, second = (sum(sent.values()) for sent, _ in run(Case(ring=2, gathers=True, document=32)))
    row = 2 * GROUPS * SIZE * BYTES  # keys and values of a token
    assert first == (2 * 24 + 8) * row  # sent in forward, again in backward, and gradients of what it had fetched
    assert second == (2 * 8 + 24) * row


def test_activations_for_backward_fall_as_1_over_cp() -> None:
    alone = LENGTH * BATCH * GROUPS * (HEADS + 2) * SIZE + LENGTH * BATCH * GROUPS * HEADS * (SIZE + 1)
    for case in (Case(ring=2), Case(ring=3, gathers=True), Case(ring=2, alltoall=2)):
        for _, kept in run(case):
            assert kept == pytest.approx(alone / case.size, rel=0.1)


def blocks_at_once(context: ParallelContext, case: Case, blocks: int) -> int:
    """Blocks of keys and values of others that forward has at the same time; `blocks` is what it should have."""
    arrived: list[tuple[StorageWeakRef, int]] = []
    most = [0]

    def held() -> int:
        return sum(count for block, count in arrived if not block.expired())

    def watched(start: Any) -> Any:
        def call(x: Tensor, *arguments: Any) -> Tensor:
            found: Tensor = start(x, *arguments)
            arrived.append((StorageWeakRef(found.untyped_storage()), len(found) * case.size // LENGTH))
            # gloo's own thread lets go of a block a moment after others have seen it arrive.
            any(held() <= blocks for _ in pauses(2))
            most.append(held())
            return found

        return call

    exchange_module.start_all_gather = watched(exchange_module.start_all_gather)
    exchange_module.start_all_to_all = watched(exchange_module.start_all_to_all)
    _, ranks, mask = share_of(context, case, None)
    with torch.no_grad():
        context_attention(*parts_of(LENGTH // case.size), ranks, mask, partial(whole_attention, documents=None))  # type: ignore[call-arg, arg-type]
    return max(most)


@pytest.mark.parametrize(("case", "blocks"), [(Case(ring=4), 2), (Case(ring=4, gathers=True), 4)], ids=str)
def test_a_ring_holds_two_blocks_where_a_gather_holds_all(case: Case, blocks: int) -> None:
    layout, needs = ParallelLayout(cp=case.size), GroupNeeds(context_ring=case.ring)
    assert run_ranks(blocks_at_once, case.size, case, blocks, layout=layout, needs=needs) == [blocks] * case.size
