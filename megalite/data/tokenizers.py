"""Turns text into token ids and back, always by a `tokenizers` model, so that transformers loads what we save.

`byte` and `char` are such models too; because they are plain tables, a long text is encoded by an array look-up that
gives the same ids. The end-of-document token ends every document and never arises from its text: `<|endoftext|>`
spelled out in a text is encoded as ordinary text.
"""

import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megalite.config.durable_files import write_atomically
from megalite.config.user_files import read_object, read_text, refusing
from megalite.data.permutation import IntArray
from megalite.errors.problems import Problem, UserError

END = "<|endoftext|>"
AGAIN = "copy the tokenizer again, or give a folder with tokenizer.json that AutoTokenizer.from_pretrained loads"
SPARSE = 65_536  # ids more than tokens that a vocabulary may have: some leave room for tokens to come
KEPT_SETTINGS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "clean_up_tokenization_spaces")


class TextTokenizer:
    """A tokenizer and what training must know about it."""

    def __init__(self, backend: Tokenizer, settings: dict[str, Any], end_of_document: int | None = None) -> None:
        self.backend, self.settings = backend, settings
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # special tokens in a text are text
        eos = token_text(settings.get("eos_token"))
        self.end_of_document: int | None = backend.token_to_id(eos) if eos else end_of_document
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._spec: dict[str, Any] = json.loads(backend.to_str())
        self._table = _symbol_table(self._spec)

    @cached_property
    def identity(self) -> str:
        """A hash of everything that decides ids, and of nothing that only concerns decoding."""
        parts = [self._spec[part] for part in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
        return xxhash.xxh3_128_hexdigest(json.dumps([parts, self.end_of_document], sort_keys=True).encode())

    @cached_property
    def recorded_identity(self) -> str:
        """What PREFIX.json of a token file says of its tokenizer: a hash of all of it."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self._spec, self.end_of_document], sort_keys=True).encode())

    @property
    def byte_level(self) -> bool:
        """Whether its tokens are written in `byte_letters`."""
        return '"ByteLevel"' in json.dumps([self._spec[part] for part in ("normalizer", "pre_tokenizer", "decoder")])

    @property
    def name(self) -> str:
        """For people: what `tokenizer` is set to for those made here, else the model that it is; and its size."""
        kind = self._spec["model"]["type"] if self._table is None else "char" if len(self._table) else "byte"
        return f"{kind} tokenizer with {self.vocab_size:,} tokens"

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added."""
        return [int(token) for token in self.encode_many([text])[0]]

    def encode_many(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text, nothing added; several texts on several threads."""
        if self._table is not None:
            return [_look_up(self._table, text) for text in texts]
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception: a symbol that it has no token for
            rule = f"cannot encode the text ({error})"
            raise UserError(
                Problem("tokenizer", self.name, rule, "tokenizer=byte, bpe, or one for this text")
            ) from error
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def files(self) -> dict[str, bytes]:
        """tokenizer.json and a tokenizer_config.json that transformers 4.57 and 5 both accept."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self.settings
        if self.end_of_document is not None and not settings.get("eos_token"):  # it was known by its id
            settings["eos_token"] = self.backend.id_to_token(self.end_of_document)
        model, others = self.backend.to_str(pretty=True), json.dumps(settings, indent=1)
        return {"tokenizer.json": model.encode(), "tokenizer_config.json": others.encode()}

    def save(self, folder: Path) -> None:
        """Write these files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_atomically(folder / name, content)


def token_text(token: Any) -> str | None:
    """A special token as transformers stores it: a text, or a record with its content."""
    return token.get("content") if isinstance(token, dict) else token


def byte_tokenizer() -> TextTokenizer:
    """One id per byte of UTF-8, and the end of document: 257 tokens."""
    backend = _byte_backend(byte_letters())
    backend.add_special_tokens([END])
    return TextTokenizer(backend, {"eos_token": END})


def char_tokenizer(texts: Iterable[str]) -> TextTokenizer:
    """One id per symbol of the texts, in the symbols' order, and nothing else."""
    symbols: set[str] = set()
    for text in texts:
        symbols.update(text)
    if not symbols:
        rule, remedy = "there is no symbol in the text: all documents are empty", "give text; check data.text_column"
        raise UserError(Problem("tokenizer", "char", rule, remedy))
    return TextTokenizer(_char_backend(sorted(symbols)), {})


def _byte_backend(symbols: Sequence[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _char_backend(symbols: Sequence[str]) -> Tokenizer:
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<|unknown|>"))  # no member: unknown is an error
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE (GPT-2's) trained on `texts`; `vocab_size` counts the 256 bytes and the end of document."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend, {"eos_token": END})


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer in a folder of transformers' files; never runs code from it. UserError for one that is damaged, or
    that nothing can be trained with: no vocabulary, an id far beyond it, an end of document that is no token."""
    settings = _settings(folder / "special_tokens_map.json") | _settings(folder / "tokenizer_config.json")
    with refusing(folder, AGAIN):
        backend = _backend_in(folder)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not backend.get_vocab(with_added_tokens=False):
            raise ValueError("its vocabulary is empty")
        token, largest = max(vocabulary.items(), key=lambda entry: entry[1])
        if largest > 2 * len(vocabulary) + SPARSE:  # an embedding of mostly unused rows
            raise ValueError(f"its token {token!r} has id {largest:,}, though it has {len(vocabulary):,} tokens")
        end = None
        if (eos := settings.get("eos_token")) is not None:
            text = token_text(eos)
            end = vocabulary.get(text) if isinstance(text, str) else None
            if end is None:
                raise ValueError(f"its end of document, eos_token {text!r:.60}, is none of its tokens")
        else:
            for name in ("config.json", "generation_config.json"):
                found = _settings(folder / name).get("eos_token_id")
                found = (found or [None])[0] if isinstance(found, list) else found
                if found is not None and not (type(found) is int and 0 <= found < 2**32 and backend.id_to_token(found)):
                    rule = f"its end of document, eos_token_id {found!r:.60} of {name}, is none of its tokens"
                    raise ValueError(rule)
                end = end if found is None else found
    return TextTokenizer(backend, {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None}, end)


def _backend_in(folder: Path) -> Tokenizer:
    """What tokenizer.json says, or the older files (vocab.json and merges.txt, SentencePiece)."""
    path = folder / "tokenizer.json"
    content = read_text(path, AGAIN) if os.path.lexists(path) else None
    try:
        if content is not None:
            return Tokenizer.from_str(content)
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: Tokenizer = theirs.backend_tokenizer
        return backend
    except Exception as error:  # both libraries raise whatever they like
        reason = (str(error).splitlines() or [""])[0]
        there = (
            "tokenizer.json cannot be read" if content else "holds no tokenizer.json, and transformers cannot load it"
        )
        raise ValueError(f"{there} ({reason})") from error


def _settings(path: Path) -> dict[str, Any]:
    return read_object(path, AGAIN) if os.path.lexists(path) else {}


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def _symbol_table(spec: dict[str, Any]) -> npt.NDArray[np.uint32] | None:
    """Code points [vocab] in the order of their ids, if the tokenizer is `char`; an empty table for `byte`; else None.

    It is one of them if its vocabulary makes the same one here: no normalizer, no prefix, no other ids.
    """
    vocabulary = spec["model"].get("vocab")
    if not isinstance(vocabulary, dict) or not all(token["special"] for token in spec["added_tokens"]):
        return None
    kind, symbols = spec["model"]["type"], sorted(vocabulary, key=vocabulary.__getitem__)
    if kind == "WordLevel" and symbols and symbols == sorted(symbols) and all(len(symbol) == 1 for symbol in symbols):
        table, ours = np.array([ord(symbol) for symbol in symbols], dtype=np.uint32), _char_backend(symbols)
    elif kind == "BPE" and symbols[:256] == byte_letters():
        table, ours = np.empty(0, dtype=np.uint32), _byte_backend(symbols)
    else:
        return None
    parts = ("normalizer", "pre_tokenizer", "model")
    same = json.loads(ours.to_str())
    return table if [spec[part] for part in parts] == [same[part] for part in parts] else None


def _look_up(table: npt.NDArray[np.uint32], text: str) -> IntArray:
    """What the model that `table` stands for gives for `text`."""
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
