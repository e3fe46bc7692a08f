"""Context parallelism: which exchange `auto` picks, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from megalite.config.exchange import Exchange, exchange_of
from megalite.config.schema import Config
from tests.config.refusal import refusal, settings


def asked(
    cp: int, *, heads: int = 8, groups: int = 8, dropout: float = 0.0, documents: bool = False, **axes: Any
) -> Exchange:
    config = Config()
    config.model = replace(
        config.model, num_attention_heads=heads, num_key_value_heads=groups, attention_dropout=dropout
    )
    config.parallel = replace(config.parallel, cp=cp, **axes)
    config.data = replace(config.data, cross_document_attention=not documents)
    return exchange_of(config)


@pytest.mark.parametrize(
    ("exchange", "name"),
    [
        (asked(4), "alltoall"),  # all heads have keys: a ring would send 24, this 12 per token
        (asked(4, heads=32, groups=2), "ring"),  # keys are few
        (asked(4, heads=3, groups=3), "ring"),  # heads do not divide
        (asked(4, heads=6, groups=6), "alltoall of 2 + ring of 2"),
        (asked(4, heads=3, groups=3, documents=True), "allgather"),
        (asked(4, heads=32, groups=2, documents=True), "alltoall"),
        (asked(4, heads=32, groups=2, dropout=0.1), "alltoall"),
        (asked(4, cp_comm="allgather"), "allgather"),
        (asked(8, heads=12, groups=4, cp_comm="alltoall+ring"), "alltoall of 4 + ring of 2"),
        (asked(8, heads=8, groups=8, cp_comm="alltoall+ring", cp_alltoall=2), "alltoall of 2 + ring of 4"),
    ],
)
def test_the_exchange_follows_heads_documents_and_dropout(exchange: Exchange, name: str) -> None:
    assert exchange.name == name


REFUSED = [
    (
        "parallel.cp=2 train.seq_length=254",
        "train.seq_length",
        ["2 x parallel.cp=2 = 4", "252 or 256", "parallel.cp=1"],
    ),
    (
        "parallel.cp=2 parallel.tp=2 train.seq_length=252",
        "train.seq_length",
        ["2 x parallel.cp=2 x parallel.tp=2 = 8", "248 or 256"],
    ),
    (
        "parallel.cp=2 parallel.cp_comm=ring train.seq_length=32",
        "train.seq_length",
        ["pieces of 8 tokens, shorter than a block of 16", "64", "parallel.cp_comm=alltoall"],
    ),
    (
        "parallel.cp=4 parallel.cp_comm=alltoall model.num_attention_heads=2",
        "parallel.cp_comm",
        ["2 query and 2 key-value heads of a rank do not divide over parallel.cp=4", "auto or ring or allgather"],
    ),
    (
        "parallel.cp=4 parallel.cp_comm=alltoall+ring model.num_attention_heads=1",
        "parallel.cp_comm",
        ["no divisor of parallel.cp=4 between 1 and 4 divides", "auto or ring"],
    ),
    (
        "parallel.cp=4 parallel.cp_comm=alltoall+ring parallel.cp_alltoall=3",
        "parallel.cp_alltoall",
        ["must be a divisor of parallel.cp=4 between 1 and 4", "parallel.cp_alltoall=2"],
    ),
    (
        "parallel.cp=2 parallel.cp_comm=alltoall+ring",
        "parallel.cp_comm",
        ["parallel.cp=2 is no product of two sizes above 1", "auto or alltoall or ring"],
    ),
    ("parallel.cp=2 parallel.cp_alltoall=2", "parallel.cp_alltoall", ["has no effect with parallel.cp_comm=auto"]),
    ("parallel.cp_comm=ring", "parallel.cp_comm", ["has no effect with parallel.cp=1", "parallel.cp=2"]),
    (
        "parallel.cp=2 parallel.cp_comm=ring model.attention_dropout=0.1",
        "model.attention_dropout",
        ["never has whole rows", "parallel.cp_comm=alltoall", "model.attention_dropout=0"],
    ),
    (
        "parallel.cp=3 model.dropout=0.1 train.seq_length=192",
        "model.attention_dropout",
        ["needs an exchange of heads", "do not divide over parallel.cp=3", "model.attention_dropout=0"],
    ),
]


@pytest.mark.parametrize(("words", "setting", "said"), REFUSED, ids=[words for words, *_ in REFUSED])
def test_what_does_not_fit_is_refused_with_what_would(words: str, setting: str, said: list[str]) -> None:
    error = refusal("train.global_batch_size=12", *words.split(), world_size=12)
    assert settings(error) == [setting]
    assert all(part in str(error) for part in said), str(error)
