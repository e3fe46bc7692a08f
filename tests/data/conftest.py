"""Small texts, small configs, and a cache of each test's own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.config.schema import Config
from megalite.prepare.tokenizing import dtype_for, write_index

WriteTokens = Callable[..., Path]


def write_token_file(
    prefix: Path, documents: list[list[int]], dtype: np.dtype, facts: dict[str, object] | None = None, **longest: int
) -> None:
    """A token file of these documents."""
    ids = np.array([token for document in documents for token in document], dtype=np.int64)
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.astype(dtype).tobytes())
    write_index(prefix, dtype, np.array([len(document) for document in documents]), facts or {}, **longest)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A config of tiny batches whose data the test chooses."""
    made = Config(tokenizer="byte")
    made.data.source = "text"
    made.data.cache_dir = str(tmp_path / "cache")
    made.data.workers = 1
    made.train.seq_length = 16
    made.train.micro_batch_size = 2
    made.train.global_batch_size = 8
    made.train.eval_batches = 2
    return made


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """write_tokens(name, documents, vocab_size): a token file; returns its prefix."""

    def write(name: str, documents: list[list[int]], vocab_size: int = 1000) -> Path:
        write_token_file(tmp_path / name, documents, dtype_for(vocab_size), {"vocab_size": vocab_size})
        return tmp_path / name

    return write
