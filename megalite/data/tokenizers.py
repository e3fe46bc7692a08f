"""Text to token ids and back, always by a `tokenizers` model, so that transformers loads what we save.

`byte` and `char` are such models too; because they are plain tables, a long text is encoded by an array look-up that
gives the same ids. The end-of-document token ends every document and never arises from its text: `<|endoftext|>`
spelled out in a text is encoded as ordinary text.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megalite.config.problems import Problem, UserError
from megalite.data.cache import make_folder, write_atomically
from megalite.data.permutation import IntArray

END = "<|endoftext|>"
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
        self._table = _symbol_table(self._spec["model"])

    @cached_property
    def _spec(self) -> dict[str, Any]:
        return json.loads(self.backend.to_str())  # type: ignore[no-any-return]

    @cached_property
    def identity(self) -> str:
        """A hash of everything that decides ids."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self._spec, self.end_of_document], sort_keys=True).encode())

    @property
    def name(self) -> str:
        """For people: the model and its size."""
        return f"{self._spec['model']['type']} with {self.vocab_size:,} tokens"

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added."""
        return [int(token) for token in self.encode_many([text])[0]]

    def encode_many(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text, nothing added; several texts on several threads."""
        if self._table is not None:
            return [_look_up(self._table, text) for text in texts]
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and a tokenizer_config.json that transformers 4.57 and 5 both accept."""
        make_folder(folder, "run_dir")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self.settings
        if self.end_of_document is not None and not settings.get("eos_token"):  # it was known by its id
            settings["eos_token"] = self.backend.id_to_token(self.end_of_document)
        write_atomically(folder / "tokenizer.json", self.backend.to_str(pretty=True).encode())
        write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=1).encode())


def token_text(token: Any) -> str | None:
    """A special token as transformers stores it: a text, or a record with its content."""
    return token.get("content") if isinstance(token, dict) else token


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
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(symbols))}
    backend = Tokenizer(
        models.WordLevel(vocab=vocabulary, unk_token="<|unknown|>")
    )  # not a member: unknown is an error
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return TextTokenizer(backend, {})


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
    """The tokenizer in a folder of transformers' files; never runs code from it."""
    settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for whatever it cannot parse
            rule = f"tokenizer.json cannot be read ({error})"
            raise UserError(Problem("tokenizer", str(folder), rule, "copy the tokenizer again")) from error
    else:
        backend = _converted(folder)
    end = None
    for name in ("config.json", "generation_config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        end = (found[0] if found else end) if isinstance(found, list) else end if found is None else found
    return TextTokenizer(backend, {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None}, end)


def named_tokenizer(name: str) -> TextTokenizer:
    """A folder, or a tokenizer of the hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return load_tokenizer(folder)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        rule = "is a file, not a folder" if folder.exists() else "there is no such folder"
        raise UserError(Problem("tokenizer", name, rule, "bpe, byte, char, or a folder that holds tokenizer.json"))
    from megalite.data.hub import tokenizer_folder

    return load_tokenizer(tokenizer_folder(name))


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def _converted(folder: Path) -> Tokenizer:
    """The fast form of a tokenizer that only has the older files (vocab.json and merges.txt, SentencePiece)."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: Tokenizer = tokenizer.backend_tokenizer
        return backend
    except Exception as error:  # whatever is wrong with a foreign folder
        reason = (str(error).splitlines() or [""])[0]
        rule = f"the folder holds no tokenizer.json, and transformers cannot load it ({reason})"
        raise UserError(Problem("tokenizer", str(folder), rule, "give a folder with tokenizer.json")) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(
            Problem("tokenizer", str(path), f"is not JSON ({error})", "copy the tokenizer again")
        ) from error
    return found if isinstance(found, dict) else {}


def _symbol_table(model: dict[str, Any]) -> npt.NDArray[np.uint32] | None:
    """Code points [vocab] in the order of their ids, if the model is `char`; an empty table for `byte`; else None."""
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    symbols = sorted(vocabulary, key=vocabulary.__getitem__)
    if model["type"] == "WordLevel" and symbols == sorted(symbols) and all(len(symbol) == 1 for symbol in symbols):
        return np.array([ord(symbol) for symbol in symbols], dtype=np.uint32)
    if model["type"] == "BPE" and not model["merges"] and symbols[:256] == byte_letters():
        return np.empty(0, dtype=np.uint32)
    return None


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
