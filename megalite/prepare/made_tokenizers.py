"""Makes the tokenizers that need no folder: byte, char, and a BPE that is trained on the text."""

import re
from collections.abc import Iterable, Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megalite.data.tokenizers import END, TextTokenizer, byte_letters
from megalite.errors.problems import Problem, UserError

LONG = 8192  # characters: the trainer's time grows with the square of a word's length
ALIKE = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")  # a part of one word: letters, digits, blanks or signs alone


def byte_tokenizer() -> TextTokenizer:
    """One id per byte of UTF-8, and the end of document: 257 tokens."""
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return TextTokenizer(backend, {"eos_token": END})


def char_tokenizer(texts: Iterable[str]) -> TextTokenizer:
    """One id per symbol of the texts, in the symbols' order, and nothing else."""
    symbols: set[str] = set()
    for text in texts:
        symbols.update(text)
    if not symbols:
        rule, hint = "there is no symbol in the text: all documents are empty", "give text; check data.text_column"
        raise UserError(Problem("tokenizer", "char", rule, hint))
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(symbols))}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<|unknown|>"))  # no member: unknown is an error
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return TextTokenizer(backend, {})


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE (GPT-2's) trained on `texts`; `vocab_size` counts the 256 bytes and the end of document."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((part for text in texts for part in short_words(text)), trainer)
    return TextTokenizer(backend, {"eos_token": END})


def short_words(text: str) -> Iterator[str]:
    """The text in parts without a word of more than twice LONG characters."""
    start = 0
    for at in range(0, len(text), LONG):
        if ALIKE.fullmatch(text, at, at + LONG):
            yield text[start:at]
            start = at
    yield text[start:]
