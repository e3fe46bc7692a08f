"""Turns text into token ids and back, always by a `tokenizers` model, so that transformers loads what we save.

The end-of-document token ends every document and never arises from its text, and no other special token does:
`<|endoftext|>` spelled out in a text is text. So texts are encoded by a tokenizer whose special tokens no text can
spell (`text_only`); what it cannot say is refused.

`byte` and `char` are such models, too; because they are plain tables, an array look-up gives the same ids, in a 14th
and a 60th of the time.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megalite.config.durable_files import write_atomically
from megalite.data.cuts import Cut, at_line_end, nowhere, where_encodings_agree
from megalite.data.permutation import IntArray
from megalite.data.tokenizer_spec import byte_letters, drops_symbols, mentions, text_only, unknown_of
from megalite.errors.problems import Problem, UserError

END = "<|endoftext|>"
KEPT_SETTINGS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "clean_up_tokenization_spaces")
ANOTHER = "tokenizer=byte, bpe, or one for this text"
LONG_WORD, LONG_WORDS = 512, 1 << 17  # characters of a word, and of all long words together: the trainer's time
# A part of a word as byte-level BPE sees it: letters, digits, signs or blanks alone.
ALIKE = re.compile(r"[^\W\d_]+|\d+|\s+|[^\w\s]+|_+")


class TextTokenizer:
    """A tokenizer, and all that training must know about it. `settings` are those of tokenizer_config.json."""

    def __init__(self, backend: Tokenizer, settings: dict[str, Any], end_of_document: int | None = None) -> None:
        self.backend, self.settings = backend, settings
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None  # a template of special tokens around every text: training adds only an end
        backend.encode_special_tokens = True  # special tokens in a text are text
        eos = token_text(settings.get("eos_token"))
        self.end_of_document: int | None = backend.token_to_id(eos) if eos else end_of_document
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._names = {number: text for text, number in vocabulary.items()}  # the library tells normalized ones
        self.vocab_size: int = max(self._names) + 1
        self._spec: dict[str, Any] = json.loads(backend.to_str())
        self._table = _symbol_table(self._spec, self.end_of_document)
        special = {token["content"] for token in self._spec["added_tokens"] if token["special"]}
        named = special | {token_text(settings.get(name)) for name in KEPT_SETTINGS[:4]}
        self._hidden = {text for text in named if text in vocabulary and len(text) > 1}  # some pad with `!`
        if self.end_of_document is not None:
            self._hidden.add(self._names[self.end_of_document])
        self._refused = np.zeros(self.vocab_size + 1, dtype=bool)  # ids that no text may give
        self._refused[[vocabulary[text] for text in self._hidden]] = True
        self._refused[self.vocab_size] = True  # of a symbol that would be dropped
        unknown = vocabulary.get(unknown_of(self._spec["model"]) or "")
        if unknown is not None and unknown != self.end_of_document:
            self._refused[unknown] = False

    @cached_property
    def identity(self) -> str:
        """A hash of everything, by which token files remember their tokenizer."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self._spec, self.end_of_document], sort_keys=True).encode())

    @property
    def byte_level(self) -> bool:
        """Whether its tokens are written in `byte_letters`."""
        return mentions(self._spec, "ByteLevel", "normalizer", "pre_tokenizer", "decoder")

    @property
    def name(self) -> str:
        """The setting of `tokenizer` for those made here, else the kind of the model; and the number of tokens."""
        kind = self._spec["model"]["type"] if self._table is None else "char" if len(self._table) else "byte"
        return f"{kind} tokenizer with {self.vocab_size:,} tokens"

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added."""
        return [int(token) for token in self.encode_many([text])[0]]

    def encode_many(self, texts: Sequence[str], before: Sequence[str] = ()) -> list[IntArray]:
        """The ids of each text, nothing added; several texts on several threads.

        `before`: for each text the end of what stands before it in its document. UserError for what the tokenizer
        cannot say.
        """
        if self._table is not None:
            return [_look_up(self._table, text) for text in texts]
        if not any(before):
            return self._encoded(texts)
        whole = self._encoded([*map("".join, zip(before, texts, strict=True)), *before])
        parts = []
        for ids, head in zip(whole[: len(texts)], whole[len(texts) :], strict=True):
            if not np.array_equal(ids[: len(head)], head):
                rule, remedy = "encodes a part of a long document otherwise than the whole", "cut the document in two"
                raise UserError(Problem("tokenizer", self.name, rule, remedy))
            parts.append(ids[len(head) :])
        return parts

    def _encoded(self, texts: Sequence[str]) -> list[IntArray]:
        try:
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception: a symbol that it has no token for
            raise UserError(Problem("tokenizer", self.name, f"cannot encode the text ({error})", ANOTHER)) from error
        found = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
        for text, ids in zip(texts, found, strict=True):
            if self._refused[ids].any():
                raise UserError(self._unsayable(text))
        return found

    @cached_property
    def _encoder(self) -> Tokenizer:
        """The same tokenizer, whose special tokens no text can spell: by its own flag, if they are added to the model's
        own tokens and special, and it drops no symbol."""
        added = {token["content"] for token in self._spec["added_tokens"] if token["special"]}
        added -= self.backend.get_vocab(with_added_tokens=False).keys()
        if added >= self._hidden and not drops_symbols(self._spec):
            return self.backend
        backend = Tokenizer.from_str(json.dumps(text_only(self._spec, self._hidden)))
        backend.encode_special_tokens = True
        return backend

    def _unsayable(self, text: str) -> Problem:
        """The first place of `text` for which this tokenizer has no token."""
        encoding = self._encoder.encode(text, add_special_tokens=False)
        at = int(np.flatnonzero(self._refused[encoding.ids])[0])
        (start, stop), token = encoding.offsets[at], encoding.ids[at]
        told = "no token" if token == self.vocab_size else f"only the special token {self._names[token]!r}"
        rule = f"has {told} for {text[start:stop]!r:.40} (character {start:,})"
        return Problem("tokenizer", self.name, rule, ANOTHER)

    def remarks(self, page: str) -> list[str]:
        """Sentences on how the tokenizer differs from what one might expect, as a page of the text shows."""
        try:
            again = self.decode(self.encode(page))
        except UserError:  # whoever encodes all of the text says where
            return []
        told = []
        if again != page:
            at = next((at for at in range(len(page)) if page[at : at + 1] != again[at : at + 1]), len(page))
            was, now = (repr(it[max(0, at - 10) : at + 20]) for it in (page, again))
            told.append(f"decoding its tokens does not give back the text (character {at:,}): {was} becomes {now}")
        if self._hidden:
            names = ", ".join(sorted(self._hidden)[:3])
            told.append(f"special tokens spelled out in the text are text; to AutoTokenizer they are tokens: {names}")
        return told

    @property
    def cut(self) -> Cut:
        """Where a long document can be cut: in two texts that have the ids of the whole, the end of the first being
        what stands `before` the second."""
        words = self._spec["pre_tokenizer"] or {"type": None}
        plain = words["type"] == "ByteLevel" and words["use_regex"] and not words["add_prefix_space"]
        added = all(token["special"] for token in self._spec["added_tokens"])
        if self._table is not None or (plain and added and self._spec["normalizer"] is None):
            return at_line_end
        # A Unigram model adds up scores over all of a word: ties in a long one are decided by rounding.
        scored = self._spec["model"]["type"] == "Unigram"
        if scored and (words["type"] is None or len(self.backend.pre_tokenizer.pre_tokenize_str("a b")) < 2):
            return nowhere
        far = any(mentions(self._spec, kind, "pre_tokenizer") for kind in ("Split", "FixedLength"))
        return where_encodings_agree(self._encoded, self.backend.pre_tokenizer.pre_tokenize_str if far else None)

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def files(self, context_length: int | None = None) -> dict[str, bytes]:
        """tokenizer.json and tokenizer_config.json by name, which AutoTokenizer reads in transformers 4.57 as in 5.
        `context_length` is the longest text that is not warned of.

        A text begins there, where something must stand before it, with the end of the document before.
        """
        spec = json.dumps(self._spec, indent=1, ensure_ascii=False) + "\n"
        settings = {"clean_up_tokenization_spaces": False} | self.settings
        # The class of both versions; the one that 5 writes by itself, 4.57 does not know.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if context_length is not None:
            settings["model_max_length"] = context_length
        if self.end_of_document is not None:
            settings["bos_token"] = settings["eos_token"] = self._names[self.end_of_document]
        return {"tokenizer.json": spec.encode(), "tokenizer_config.json": written(settings).encode()}

    def unwritten(self, folder: Path) -> dict[Path, bytes]:
        """The files that the folder lacks, or holds with another content."""
        files = {folder / name: content for name, content in self.files().items()}
        return {path: it for path, it in files.items() if not path.is_file() or path.read_bytes() != it}

    def save(self, folder: Path) -> None:
        """Write these files."""
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in self.unwritten(folder).items():
            write_atomically(path, content)


def written(settings: dict[str, Any]) -> str:
    """The content of tokenizer_config.json."""
    return json.dumps(settings, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def token_text(token: Any) -> Any:
    """A special token as transformers stores it: a text, or a record with its content."""
    return token.get("content", token) if isinstance(token, dict) else token


def byte_tokenizer() -> TextTokenizer:
    """One id per byte of UTF-8, and the end of document: 257 tokens."""
    return TextTokenizer(_byte_backend(), {"eos_token": END})


def char_tokenizer(texts: Iterable[str]) -> TextTokenizer:
    """One id per symbol of the texts, in the symbols' order, and nothing else."""
    symbols: set[str] = set()
    for text in texts:
        symbols.update(text)
    if not symbols:
        rule, remedy = "there is no symbol in the text: all documents are empty", "give text; check data.text_column"
        raise UserError(Problem("tokenizer", "char", rule, remedy))
    return TextTokenizer(_char_backend(sorted(symbols)), {})


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE (GPT-2's) trained on `texts`; `vocab_size` counts the 256 bytes and the end of document."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_short_words(texts), trainer)
    return TextTokenizer(backend, {"eos_token": END})


def _short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with words of more than LONG_WORD characters in parts once there were LONG_WORDS characters of such
    words: the trainer's time grows with the square of a word's length."""
    room = LONG_WORDS
    for text in texts:
        start = 0
        for at in range(0, len(text), LONG_WORD):
            if ALIKE.fullmatch(text, at, at + LONG_WORD):
                room -= LONG_WORD
                if room < 0:
                    yield text[start:at]
                    start = at
        yield text[start:]


def _byte_backend() -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return backend


def _char_backend(symbols: Sequence[str]) -> Tokenizer:
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<|unknown|>"))  # no member: unknown is an error
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _symbol_table(spec: dict[str, Any], end: int | None) -> npt.NDArray[np.uint32] | None:
    """Code points [vocab] in the order of their ids, if the tokenizer is `char`; an empty table for `byte`; or None."""
    vocabulary = spec["model"].get("vocab")
    if not isinstance(vocabulary, dict) or (end is not None and end < len(vocabulary)):
        return None
    symbols = sorted(vocabulary) if spec["model"]["type"] == "WordLevel" else []
    ours = json.loads((_char_backend(symbols) if symbols else _byte_backend()).to_str())
    same = all(spec[part] == ours[part] for part in ("normalizer", "pre_tokenizer", "model", "added_tokens"))
    return np.array([*map(ord, symbols)], dtype=np.uint32) if same and all(len(it) == 1 for it in symbols) else None


def _look_up(table: npt.NDArray[np.uint32], text: str) -> IntArray:
    """The ids that the model of `table` gives for `text`."""
    if not len(table):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    ids = np.searchsorted(table, points)
    unknown = np.flatnonzero(table[np.minimum(ids, len(table) - 1)] != points)
    if len(unknown):
        at = int(unknown[0])
        rule = f"the text holds {text[at]!r} (character {at:,}), which is none of the tokenizer's {len(table)} symbols"
        raise UserError(Problem("tokenizer", "char", rule, "use only symbols of the training text, or tokenizer=byte"))
    return ids.astype(np.int64)
