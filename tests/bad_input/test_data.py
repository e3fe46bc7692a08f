"""Bad data that every reader expects first (missing, empty, binary), a row each; others are in
tests/prepare/test_bad_inputs_of_data.py."""

import pytest

from tests.bad_input.launching import SMALL, TOKENS, Row, Scene, check, corpus, file, truncated_corpus

ROWS = [
    Row("a missing file", "data=text data.path=none.txt", ["none.txt", "no such file", ".csv"]),
    Row("an empty file", "data=text data.path=e.txt", ["e.txt", "is empty (0 bytes)"], file("e.txt", b"")),
    Row(
        "a binary file that begins as text",
        "data=text data.path=b.txt",
        ["b.txt", "is not UTF-8 text"],
        file("b.txt", b"good text\n" * 300_000 + b"\xff\xfe"),
    ),
    Row(
        "a short text",
        "data=text data.path=s.txt",
        ["/s.txt'", "one sample of 17", "=5 or less"],
        file("s.txt", b"short"),
    ),
    Row("truncated tokens", " ".join(TOKENS), ["corpus.bin", "has 8,000 bytes", "describes 10,000"], truncated_corpus),
    Row("tokens without a vocabulary", "data=tokens data.path=corpus", ["model.vocab_size=null", "set it"], corpus),
    Row("a small vocabulary", "model.vocab_size=100", ["=100", "257 tokens of the tokenizer", "model.vocab_size=null"]),
    Row("no tokenizer's folder", "tokenizer=./none", ["'./none'", "no folder", "transformers tokenizer"]),
    Row(
        "hub names without network",
        "data=hf data.path=some/corpus tokenizer=some/tokenizer",
        ["2 problems", "some/corpus", "some/tokenizer", "hub does not answer", "to work offline"],
    ),
    Row(
        "a device and data that are not there",
        "device=cuda data=text data.path=none.txt tokenizer=some/tokenizer",
        ["3 problems", "none.txt"],
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bad_data_is_refused(row: Row, scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, scene, capfd, SMALL)
