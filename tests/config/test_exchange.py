"""Which exchange of context-parallel ranks the config asks for."""

from typing import Any

import pytest

from megalite.config.exchange import exchange_of
from megalite.config.schema import Config
from megalite.config.settings import with_values


@pytest.mark.parametrize(
    ("cp", "heads", "groups", "others", "name"),
    [
        (4, 8, 8, {}, "alltoall"),  # all heads have keys: a ring would send 24, this 12 per token
        (4, 32, 2, {}, "ring"),  # keys are few
        (4, 3, 3, {}, "ring"),  # heads do not divide
        (4, 6, 6, {}, "alltoall of 2 + ring of 2"),
        (4, 3, 3, {"data.cross_document_attention": False}, "allgather"),
        (4, 32, 2, {"data.cross_document_attention": False}, "alltoall"),
        (4, 32, 2, {"model.attention_dropout": 0.1}, "alltoall"),
        (4, 8, 8, {"parallel.cp_comm": "allgather"}, "allgather"),
        (8, 12, 4, {"parallel.cp_comm": "alltoall+ring"}, "alltoall of 4 + ring of 2"),
        (8, 8, 8, {"parallel.cp_comm": "alltoall+ring", "parallel.cp_alltoall": 2}, "alltoall of 2 + ring of 4"),
    ],
)
def test_it_follows_heads_documents_and_dropout(
    cp: int, heads: int, groups: int, others: dict[str, Any], name: str
) -> None:
    sizes = {"parallel.cp": cp, "model.num_attention_heads": heads, "model.num_key_value_heads": groups}
    assert exchange_of(with_values(Config(), sizes | others)).name == name
