"""Counts the bytes of text that each token id stands for, so that bytes of text follow from ids alone.

Exact for byte, char and every byte-level BPE. Elsewhere it is the text that the tokenizer decodes an id to inside a
sentence: what a normalizer drops does not count, and SentencePiece's space before a document is a byte of it. Special
tokens and the end of document stand for no text.
"""

import re

import numpy as np
from tokenizers import Tokenizer

from megalite.data.permutation import IntArray
from megalite.data.tokenizer_spec import byte_letters
from megalite.data.tokenizers import TextTokenizer

BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's token for a byte that no other token covers


def bytes_of_ids(tokenizer: TextTokenizer, vocab_size: int) -> IntArray:
    """Bytes of UTF-8 of each id, [vocab_size]; 0 for ids beyond the tokenizer's."""
    backend = tokenizer.backend
    vocabulary = backend.get_vocab(with_added_tokens=False)
    decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
    if tokenizer.byte_level:
        letters = set(byte_letters())
        found = {token: len(text if letters.issuperset(text) else text.encode()) for text, token in vocabulary.items()}
    else:
        found = _decoded(backend, sorted(vocabulary.values()))
        if b'"ByteFallback"' in decoder:
            found |= {token: 1 for text, token in vocabulary.items() if BYTE.fullmatch(text)}
    for token, added in backend.get_added_tokens_decoder().items():
        found[token] = 0 if added.special else len(added.content.encode())
    if tokenizer.end_of_document is not None:
        found[tokenizer.end_of_document] = 0
    sizes = np.zeros(vocab_size, dtype=np.int64)
    sizes[list(found)] = list(found.values())
    return sizes


def _decoded(backend: Tokenizer, tokens: list[int]) -> dict[int, int]:
    """Between two other tokens, as the first and the last of a text may lose a space."""
    if not tokens:
        return {}
    other = next((token for token in tokens if str(backend.id_to_token(token)).isalpha()), tokens[0])
    texts = backend.decode_batch([[other, other], *([other, token, other] for token in tokens)])
    without, *sizes = (len(text.encode()) for text in texts)
    return {token: max(0, size - without) for token, size in zip(tokens, sizes, strict=True)}
