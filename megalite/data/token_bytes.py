"""Counts the bytes of text that each token id stands for, so that bytes of text follow from ids alone.

Exact for byte, char and every byte-level BPE. Elsewhere it is the text that the tokenizer decodes an id to inside a
sentence: what a normalizer drops does not count, and SentencePiece's space before a document is a byte of it. Special
tokens and the end of document stand for no text.
"""

import json
import re

import numpy as np

from megalite.data.permutation import IntArray
from megalite.data.tokenizers import TextTokenizer, byte_letters

BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's token for a byte that no other token covers


def bytes_of_ids(tokenizer: TextTokenizer, vocab_size: int) -> IntArray:
    """Bytes of UTF-8 of each id, [vocab_size]; 0 for ids beyond the tokenizer's."""
    backend = tokenizer.backend
    vocabulary = backend.get_vocab(with_added_tokens=False)
    sizes = np.zeros(vocab_size, dtype=np.int64)
    if any('"ByteLevel"' in json.dumps(tokenizer.spec[part]) for part in ("normalizer", "pre_tokenizer", "decoder")):
        letters = set(byte_letters())
        for text, token in vocabulary.items():
            sizes[token] = len(text if letters.issuperset(text) else text.encode())
    elif tokens := sorted(vocabulary.values()):
        # Between two other tokens, as the first and the last of a text may lose a space.
        other = next((token for token in tokens if str(backend.id_to_token(token)).isalpha()), tokens[0])
        texts = backend.decode_batch([[other, other], *([other, token, other] for token in tokens)])
        without, *found = (len(text.encode()) for text in texts)
        sizes[tokens] = np.maximum(0, np.array(found) - without)
        if "ByteFallback" in str(tokenizer.spec["decoder"]):
            sizes[[token for text, token in vocabulary.items() if BYTE.fullmatch(text)]] = 1
    for token, added in backend.get_added_tokens_decoder().items():
        sizes[token] = 0 if added.special else len(added.content.encode())
    if tokenizer.end_of_document is not None:
        sizes[tokenizer.end_of_document] = 0
    return sizes
