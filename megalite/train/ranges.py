"""Named ranges of a profile: blocks and what is in them, the loss, and blocks in backward.

They exist while a step is profiled. What calls `before_use` and `after_part` of a chunk is never compiled, so blocks
and the loss have names in compiled models, too; the parts of a compiled block have none. In backward, a range lasts
from the gradient by a part's output to that by the output of the part before.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from megalite.model.block import Block
from megalite.model.gpt import GPT, unseen


class Ranges:
    """The open ranges of each thread: backward has its own on CUDA, and a range ends where it began."""

    def __init__(self) -> None:
        self._open = defaultdict[int, list[record_function]](list)

    def enter(self, name: str) -> None:
        self._open[get_ident()].append(entered := record_function(name))
        entered.__enter__()

    def leave(self, *_: Any) -> None:
        """End the newest, if there is one."""
        if self._open[get_ident()]:
            self._open[get_ident()].pop().__exit__(None, None, None)

    def next(self, name: str | None, *_: Any) -> None:
        """End all, and begin this one."""
        while self._open[get_ident()]:
            self.leave()
        if name is not None:
            self.enter(name)


@contextmanager
def named_ranges(chunks: Sequence[GPT]) -> Iterator[None]:
    """Meanwhile parts of the model are ranges of the profile."""
    ranges = Ranges()
    with ExitStack() as hooks:
        for chunk in chunks:
            before_use, normed = chunk.before_use, list[str]()
            chunk.before_use = partial(_begin, ranges, normed, before_use)
            chunk.after_part = partial(_end, ranges, normed)
            hooks.callback(setattr, chunk, "after_part", unseen)
            hooks.callback(setattr, chunk, "before_use", before_use)
            for block in chunk.blocks.values():
                assert isinstance(block, Block)
                for name, module in block.named_children() if not chunk.compiled else ():
                    _name(module, name, ranges, hooks)
        yield


def _name(module: nn.Module, name: str, ranges: Ranges, hooks: ExitStack) -> None:
    hooks.callback(module.register_forward_pre_hook(lambda *_: ranges.enter(name)).remove)
    hooks.callback(module.register_forward_hook(ranges.leave).remove)


def _begin(ranges: Ranges, normed: list[str], before_use: Any, part: str) -> None:
    """Parameters of a part are about to be used: behind the final norm, those of the head."""
    before_use(part)
    ranges.next("loss" if normed else _words(part))
    normed.clear()


def _end(ranges: Ranges, normed: list[str], part: str, x: Tensor) -> None:
    """A part is done. Its backward begins when the gradient by its output is there."""
    ranges.next(None)
    normed += [part] if part == "final_norm" else []
    if x.requires_grad:
        name = None if part in ("embedding", "received") else f"backward of {_words(part)}"
        x.register_hook(partial(ranges.next, name))


def _words(part: str) -> str:
    return part.replace("blocks.", "block ").replace("_", " ")
