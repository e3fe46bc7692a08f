"""Which keys each query sees: those of its own document up to itself. Built once per microbatch, for all layers.

Documents are runs of neighbours, numbered upwards in each sequence, so a block of query rows needs the keys from the
first of its first row's document up to its last row. Flex attention (CUDA, compiled) gets that as a table of blocks, of
one shape whatever the documents are: nothing waits for the device, nothing is compiled again. Attention by rows (CPU)
takes these keys alone. Everything else adds a dense mask to the scores.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.layout.sequence import AttentionPlan

if TYPE_CHECKING:  # who imports it imports the compiler
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # query rows, and on CUDA keys
MAX_ROWS = 1024  # tokens of a sequence up to which a CPU computes by rows: what it keeps grows with their square


@dataclass(frozen=True)
class DocumentRows:
    """`documents` [b, s] of a microbatch on a CPU, and for each block of BLOCK rows the first key that it needs."""

    documents: Tensor
    first_keys: list[int]

    @classmethod
    def of(cls, documents: Tensor) -> "DocumentRows":
        return cls(documents, _document_starts(documents)[:, ::BLOCK].amin(0).tolist())

    def hidden(self, start: int, stop: int, first: int) -> Tensor:
        """Which of the keys [first, stop) the rows [start, stop) do not see: bool [b, rows, keys]."""
        rows, keys = torch.arange(start, stop), torch.arange(first, stop)
        other = self.documents[:, start:stop, None] != self.documents[:, None, first:stop]
        return other | (keys > rows[:, None])


@dataclass(frozen=True)
class AttentionMask:
    """The one description that attention, its kernels and its exchanges take; by default plainly causal.

    `form` is what kernels take of whole sequences (None: plainly causal; a tensor [b, 1, s, s] is added to the scores).
    `plan` and `documents` [b, s] say the same to ranks of a ring, which have parts of sequences. `kernels` is
    train.attention.
    """

    form: "Tensor | BlockMask | DocumentRows | None" = None
    kernels: str = "auto"
    documents: Tensor | None = None
    plan: AttentionPlan | None = None


def dense_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a token may attend (earlier or itself, same document), else -inf: [b, s] -> [b, 1, s, s]."""
    same = documents[:, :, None] == documents[:, None, :]
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~same.tril_(), float("-inf")).unsqueeze(1)


def block_mask(documents: Tensor) -> "BlockMask":
    """For each block of rows of documents [b, s], the blocks of keys that need a look at each pair, and those that do
    not."""
    from torch.nn.attention.flex_attention import BlockMask

    s = documents.shape[1]
    starts, count = _document_starts(documents), -(-s // BLOCK)
    here = torch.arange(count, device=documents.device)
    last_rows = ((here + 1) * BLOCK - 1).clamp(max=s - 1)
    first = starts[:, here * BLOCK] // BLOCK  # [b, count]
    whole = (starts[:, last_rows] + BLOCK - 1) // BLOCK  # the first block of keys that all of its rows see
    before = here < here[:, None]  # [of rows, of keys]
    needed = (here >= first[..., None]) & (before | (here == here[:, None]))  # [b, count, count]
    full = (here >= whole[..., None]) & before

    def same_document(sample: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (documents[sample, row] == documents[sample, key])

    return BlockMask.from_kv_blocks(
        *_in_order(needed & ~full), *_in_order(full), BLOCK_SIZE=BLOCK, mask_mod=same_document, seq_lengths=(s, s)
    )


def _document_starts(documents: Tensor) -> Tensor:
    """Where the document of each token begins: [b, s], int64."""
    positions = torch.arange(documents.shape[1], device=documents.device)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(new, positions, 0).cummax(1).values


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of rows has, [b, 1, count], and their numbers first, [b, 1, count, count]."""
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), numbers.to(torch.int32).unsqueeze(1)
