"""Turns text into token ids and back, always by a `tokenizers` model, so that transformers loads what we save.

`byte` and `char` are such models too; because they are plain tables, a long text is encoded by an array look-up that
gives the same ids. The end-of-document token ends every document and never arises from its text: `<|endoftext|>`
spelled out in a text is encoded as ordinary text.
"""

import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
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
KEPT_SETTINGS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "clean_up_tokenization_spaces")


class TextTokenizer:
    """A tokenizer and what training must know about it."""

    def __init__(self, backend: Tokenizer, settings: dict[str, Any], end_of_document: int | None = None) -> None:
        self.backend, self.settings = backend, settings
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None  # a template of special tokens around every text: training adds only an end
        backend.encode_special_tokens = True  # special tokens in a text are text
        eos = token_text(settings.get("eos_token"))
        self.end_of_document: int | None = backend.token_to_id(eos) if eos else end_of_document
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._spec: dict[str, Any] = json.loads(backend.to_str())
        self._table = _symbol_table(self._spec)

    @cached_property
    def identity(self) -> str:
        """A hash of all of it, by which token files remember their tokenizer."""
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
            rule, remedy = f"cannot encode the text ({error})", "tokenizer=byte, bpe, or one for this text"
            raise UserError(Problem("tokenizer", self.name, rule, remedy)) from error
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

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
            settings["bos_token"] = settings["eos_token"] = self.backend.id_to_token(self.end_of_document)
        others = json.dumps(settings, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        return {"tokenizer.json": spec.encode(), "tokenizer_config.json": others.encode()}

    def unwritten(self, folder: Path) -> dict[Path, bytes]:
        """The files that the folder lacks, or holds with another content."""
        files = {folder / name: content for name, content in self.files().items()}
        return {path: it for path, it in files.items() if not path.is_file() or path.read_bytes() != it}

    def save(self, folder: Path) -> None:
        """Write these files."""
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in self.unwritten(folder).items():
            write_atomically(path, content)


def token_text(token: Any) -> Any:
    """A special token as transformers stores it: a text, or a record with its content."""
    return token.get("content", token) if isinstance(token, dict) else token


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


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Byte-level BPE (GPT-2's) trained on `texts`; `vocab_size` counts the 256 bytes and the end of document."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend, {"eos_token": END})


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


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer in a folder of transformers' files; never runs code from it. UserError for one that is damaged, or
    that nothing can be trained with: no vocabulary, an end of document that is no token."""
    settings = _settings(folder / "special_tokens_map.json") | _settings(folder / "tokenizer_config.json")
    with refusing(folder, AGAIN):
        backend = _backend_in(folder)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not backend.get_vocab(with_added_tokens=False):
            raise ValueError("its vocabulary is empty")
        eos, end = token_text(settings.get("eos_token")), None
        if eos is None:
            eos = end = _end_of_model(folder)
        if eos is not None and eos not in [*(vocabulary if end is None else vocabulary.values())]:
            raise ValueError(f"its end of document, {eos!r:.60}, is none of its tokens")
    return TextTokenizer(backend, {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None}, end)


def _end_of_model(folder: Path) -> Any:
    """eos_token_id of the model's files, for a tokenizer that names no end of document."""
    files = (_settings(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json"))
    found = next((eos for eos in files if eos is not None), None)
    return next(iter(found), None) if isinstance(found, list) else found


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
        there = "tokenizer.json cannot be read" if content else "holds no tokenizer.json that transformers can load"
        raise ValueError(f"{there} ({(str(error).splitlines() or [''])[0]})") from error


def _settings(path: Path) -> dict[str, Any]:
    return read_object(path, AGAIN) if os.path.lexists(path) else {}


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table): itself, or one from 256 on."""
    alphabet, hidden = set(pre_tokenizers.ByteLevel.alphabet()), count(256)
    return [chr(byte) if chr(byte) in alphabet else chr(next(hidden)) for byte in range(256)]


def _symbol_table(spec: dict[str, Any]) -> npt.NDArray[np.uint32] | None:
    """Code points [vocab] in the order of their ids, if the tokenizer is `char`; an empty table for `byte`; else None.

    It is one of them if its vocabulary makes the same one here: no normalizer, no prefix, no other ids.
    """
    kind, vocabulary = spec["model"]["type"], spec["model"].get("vocab")
    if kind not in ("BPE", "WordLevel") or not vocabulary or not all(it["special"] for it in spec["added_tokens"]):
        return None
    symbols = sorted(vocabulary, key=vocabulary.__getitem__)
    if kind == "BPE" and symbols[:256] == byte_letters():
        table, ours = np.empty(0, dtype=np.uint32), _byte_backend(symbols)
    elif kind == "WordLevel" and symbols == sorted(symbols) and all(len(symbol) == 1 for symbol in symbols):
        table, ours = np.array([ord(symbol) for symbol in symbols], dtype=np.uint32), _char_backend(symbols)
    else:
        return None
    same = json.loads(ours.to_str())
    return table if all(spec[part] == same[part] for part in ("normalizer", "pre_tokenizer", "model")) else None


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
