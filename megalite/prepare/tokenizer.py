"""Finds or trains the tokenizer of a preparation."""

import os
from collections.abc import Iterator
from pathlib import Path

from megalite.data.tokenizers import TextTokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer, load_tokenizer
from megalite.prepare.cache import locked, make_folder
from megalite.prepare.hub import tokenizer_folder
from megalite.prepare.reading import Shard, documents

SAMPLE = 8 << 20  # bytes of text that a BPE is trained on
SAMPLED_SHARDS = 64


def named_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer in a folder, or of that name on the hub."""
    return load_tokenizer(tokenizer_folder(name))


def obtain_tokenizer(name: str, folder: Path | None, vocab_size: int, plans: list[list[Shard]]) -> TextTokenizer:
    """The tokenizer of that name; bpe and char are trained on the planned shards and kept in `folder`."""
    if folder is None:
        return byte_tokenizer() if name == "byte" else named_tokenizer(name)
    make_folder(folder.parent)
    with locked(folder.with_name(folder.name + ".lock")):
        if not (folder / "tokenizer.json").exists():
            shards = [shard for plan in plans for shard in plan]
            if name == "char":
                trained = char_tokenizer(text for shard in shards for text in documents(shard))
            else:
                trained = bpe_tokenizer(sample(shards), vocab_size)
            draft = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
            trained.save(draft)
            draft.replace(folder)
        return load_tokenizer(folder)


def sample(shards: list[Shard], size: int = SAMPLE) -> Iterator[str]:
    """About `size` characters of text from all over the data, the same on every call."""
    chosen = shards[:: -(-len(shards) // SAMPLED_SHARDS)]
    for number, shard in enumerate(chosen):
        share = size // (len(chosen) - number)
        for text in documents(shard):
            yield text[:share]
            size -= len(text[:share])
            share -= len(text[:share])
            if share <= 0:
                break
