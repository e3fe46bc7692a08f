"""The bytes of a text are the sum over its ids."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megalite.data.tokenizers import END, TextTokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer

TEXT = "Where the wild thyme blows, ünïcödé 漢字 and 🎉 grow;\n\tthe end of the thing.\n" * 3
PLAIN = "Where the wild thyme blows\nand oxlips grow"


def sentencepiece() -> TextTokenizer:
    """BPE with bytes for what it does not know, as Llama 2's: a space becomes ▁, and one stands before a text."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    named = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<unk>", "</s>", *named], show_progress=False)
    backend.train_from_iterator([PLAIN] * 9, trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in named]
    return TextTokenizer(Tokenizer.from_str(json.dumps(spec)), {"eos_token": "</s>"})


def word_pieces() -> TextTokenizer:
    """As BERT's."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator([PLAIN], trainer)
    return TextTokenizer(backend, {})


@pytest.mark.parametrize(
    ("tokenizer", "text", "spaces_put_before"),
    [
        (byte_tokenizer(), TEXT, 0),
        (char_tokenizer([TEXT]), TEXT, 0),
        (bpe_tokenizer([TEXT], 270), TEXT, 0),  # characters are cut between tokens
        (bpe_tokenizer([TEXT], 400), TEXT, 0),
        (sentencepiece(), TEXT, 1),
        (word_pieces(), PLAIN, 1),
    ],
)
def test_the_bytes_of_a_text_are_the_sum_over_its_ids(
    tokenizer: TextTokenizer, text: str, spaces_put_before: int
) -> None:
    ids = tokenizer.encode(text)
    assert len(set(ids)) > 7
    assert tokenizer.bytes_of_ids(tokenizer.vocab_size)[ids].sum() == len(text.encode()) + spaces_put_before


def test_what_is_no_text_has_no_bytes_and_added_words_have_theirs() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens(["wörd"])
    sizes = tokenizer.bytes_of_ids(300)
    assert (sizes.shape, sizes.dtype) == ((300,), np.int64)
    assert sizes[tokenizer.backend.token_to_id(END)] == 0
    assert sizes[257] == len("wörd".encode())
    assert not sizes[258:].any()


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), bpe_tokenizer([TEXT], 270)])
def test_letters_that_stand_for_bytes_count_one_each_whatever_decodes_them(tokenizer: TextTokenizer) -> None:
    spec = json.loads(tokenizer.backend.to_str()) | {"decoder": None}
    bare = TextTokenizer(Tokenizer.from_str(json.dumps(spec)), tokenizer.settings)
    assert np.array_equal(bare.bytes_of_ids(300), tokenizer.bytes_of_ids(300))
