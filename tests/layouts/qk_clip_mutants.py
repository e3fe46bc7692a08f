"""Mistakes of QK-clip, in ranks that end with them: what the comparison with one process must catch."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import OwnedRange
from megalite.model import attention as attention_module
from megalite.model.attention import Attention
from megalite.optim import qk_clip as qk_clip_module
from megalite.optim.qk_clip import QkClip


def of_the_last_microbatch(context: ParallelContext, config: Config) -> None:
    right = attention_module.raise_largest

    def lowered_first(largest: Tensor, *others: Any) -> None:
        right(largest.fill_(-torch.inf), *others)

    attention_module.raise_largest = lowered_first


def of_this_rank(context: ParallelContext, config: Config) -> None:
    """What other ranks have seen of the same heads is forgotten."""
    right = QkClip.step

    def step(self: QkClip, skip: Tensor) -> Tensor:
        self._world = None
        return right(self, skip)

    QkClip.step = step  # type: ignore[method-assign]


def of_own_keys(context: ParallelContext, config: Config) -> None:
    """Ranks that share sequences do not look at the others' keys."""
    right = Attention.note_largest

    def note_largest(self: Attention, *args: Any) -> None:
        whole, self.context = self.context, None
        right(self, *args)
        self.context = whole

    Attention.note_largest = note_largest  # type: ignore[method-assign]


def of_the_box(context: ParallelContext, config: Config) -> None:
    """The value is what comes last of each box, also of one with queries alone."""
    right = qk_clip_module.rows_of

    def rows_of(owned: OwnedRange, master: Tensor) -> Any:
        record, box = owned.slot.record, owned.box
        shape = (record.shape[0], box.offsets[1] + box.sizes[1], *record.shape[2:])
        return right(replace(owned, slot=replace(owned.slot, record=replace(record, shape=shape))), master)

    qk_clip_module.rows_of = rows_of


def without_documents(context: ParallelContext, config: Config) -> None:
    right = attention_module.raise_largest
    attention_module.raise_largest = lambda *args: right(*args[:-1], None)
