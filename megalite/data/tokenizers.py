"""Turns text into token ids and back, always by a `tokenizers` model, so that transformers loads what we save.

The end-of-document token ends every document and never arises from its text, and no other special token does:
`<|endoftext|>` spelled out in a text is text, and a text for which a tokenizer has no other ids is refused.

For folders, AutoTokenizer is the specification. A folder that `TextTokenizer.save` has written says the same by
tokenizer.json alone, and is read without transformers. No code from a folder is run.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megalite.config.files import read_object, read_text, refusing, write_atomically
from megalite.data.samples import IntArray
from megalite.errors.problems import Problem, UserError

END = "<|endoftext|>"
SPECIAL_SETTINGS = ("bos_token", "eos_token", "pad_token", "unk_token")
KEPT_SETTINGS = (*SPECIAL_SETTINGS, "chat_template", "clean_up_tokenization_spaces")
NO_TOKEN = "no token for a symbol"  # no member of any vocabulary
BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's token for a byte that no other token covers
AGAIN = "copy the tokenizer again, or give a folder with tokenizer.json that AutoTokenizer.from_pretrained loads"
SPECIAL, SETTINGS, ADDED = "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json"
MODEL = ("generation_config.json", "config.json")


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
        self.spec: dict[str, Any] = json.loads(backend.to_str())
        model = self.spec["model"]
        unknown = model.get("unk_id", vocabulary.get(model.get("unk_token")))
        special = {token["content"] for token in self.spec["added_tokens"] if token["special"]}
        special |= {text for text in map(token_text, map(settings.get, SPECIAL_SETTINGS)) if isinstance(text, str)}
        ids = {vocabulary[text] for text in special & vocabulary.keys() if len(text) > 1}  # some pad with `!`
        refused = [*(ids - {unknown}), *([] if self.end_of_document is None else [self.end_of_document])]
        self._refused = np.isin(np.arange(self.vocab_size), refused)  # ids that no text may give
        if model["type"] == "BPE" and model["unk_token"] is None:
            backend.model.unk_token = NO_TOKEN  # an error, where the library would pass over a symbol without a word

    @cached_property
    def identity(self) -> str:
        """A hash of everything, by which token files remember their tokenizer."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.spec, self.end_of_document], sort_keys=True).encode())

    @cached_property
    def _gives_bytes(self) -> bool:
        """Whether this is `byte`, whose ids are the bytes of the text. The model takes ten times as long to say so."""
        return self.spec == byte_tokenizer().spec and not self._refused[:256].any()

    @property
    def name(self) -> str:
        """The kind of its model, byte or char where a token is one byte or symbol, and the number of tokens."""
        kind = self.spec["model"]["type"]
        if all(len(text) == 1 for text in self.backend.get_vocab(with_added_tokens=False)):
            kind = "byte" if self.mentions("ByteLevel", "pre_tokenizer") else "char"
        return f"{kind} tokenizer with {self.vocab_size:,} tokens"

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added."""
        return [int(token) for token in self.encode_many([text])[0]]

    def encode_many(self, texts: Sequence[str]) -> list[IntArray]:
        """The ids of each text, nothing added; several texts on several threads. UserError for what the tokenizer
        cannot encode."""
        try:
            if self._gives_bytes:
                return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception: a symbol that it has no token for
            raise self.refusal(f"cannot encode the text: a part of it has no token ({error})") from error
        found = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
        for ids in found:
            for token in ids[self._refused[ids]][:1]:
                raise self.refusal(f"has only the special token {self._names[int(token)]!r} for a part of the text")
        return found

    def refusal(self, rule: str) -> UserError:
        """The refusal of a text."""
        return UserError(Problem("tokenizer", self.name, rule, "tokenizer=byte, bpe, or one for this text"))

    def mentions(self, kind: str, part: str) -> bool:
        """Whether a part of the tokenizer (its pre-tokenizer, say) is or holds a step of this kind."""
        return f'"{kind}"' in json.dumps(self.spec[part])

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def bytes_of_ids(self, vocab_size: int) -> IntArray:
        """Bytes of UTF-8 that each id stands for, [vocab_size]; 0 for special tokens and ids beyond the tokenizer's.
        Exact for byte-level BPE, byte and char. Elsewhere it is the text that the tokenizer decodes an id to inside a
        sentence: what a normalizer drops does not count, and SentencePiece's space before a document does."""
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        if any(self.mentions("ByteLevel", part) for part in ("normalizer", "pre_tokenizer", "decoder")):
            letters = set(byte_letters())
            found = {i: len(text if letters.issuperset(text) else text.encode()) for text, i in vocabulary.items()}
        else:  # decoded between two other tokens, as the first and the last of a text may lose a space
            tokens = sorted(vocabulary.values())
            other = next((it for it in tokens if str(self.backend.id_to_token(it)).isalpha()), tokens[0])
            texts = self.backend.decode_batch([[other, other], *([other, token, other] for token in tokens)])
            without, *sizes = (len(text.encode()) for text in texts)
            found = {token: max(0, size - without) for token, size in zip(tokens, sizes, strict=True)}
            if self.mentions("ByteFallback", "decoder"):
                found |= {token: 1 for text, token in vocabulary.items() if BYTE.fullmatch(text)}
        for token, added in self.backend.get_added_tokens_decoder().items():
            found[token] = 0 if added.special else len(added.content.encode())
        if self.end_of_document is not None:
            found[self.end_of_document] = 0
        sizes_of_ids = np.zeros(vocab_size, dtype=np.int64)
        sizes_of_ids[list(found)] = list(found.values())
        return sizes_of_ids

    def files(self, context_length: int | None = None) -> dict[str, bytes]:
        """tokenizer.json and tokenizer_config.json by name, which AutoTokenizer reads in transformers 4.57 as in 5.
        `context_length` is the longest text that is not warned of. A text begins with the end of the document before,
        where something must stand before it."""
        spec = json.dumps(self.spec, indent=1, ensure_ascii=False) + "\n"
        settings = {"clean_up_tokenization_spaces": False} | self.settings
        # The class of both versions; the one that 5 writes by itself, 4.57 does not know.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if context_length is not None:
            settings["model_max_length"] = context_length
        if self.end_of_document is not None:
            settings["bos_token"] = settings["eos_token"] = self._names[self.end_of_document]
        return {"tokenizer.json": spec.encode(), "tokenizer_config.json": written(settings).encode()}

    def save(self, folder: Path) -> None:
        """Write these files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_atomically(folder / name, content)


def written(settings: dict[str, Any]) -> str:
    """The content of tokenizer_config.json."""
    return json.dumps(settings, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def token_text(token: Any) -> Any:
    """A special token as transformers stores it: a text, or a record with its content."""
    return token.get("content", token) if isinstance(token, dict) else token


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table): itself, or one from 256 on."""
    alphabet, hidden = set(pre_tokenizers.ByteLevel.alphabet()), count(256)
    return [chr(byte) if chr(byte) in alphabet else chr(next(hidden)) for byte in range(256)]


def byte_tokenizer() -> TextTokenizer:
    """One id per byte of UTF-8, and the end of document: 257 tokens."""
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return TextTokenizer(backend, {"eos_token": END})


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer in a folder of transformers' files. UserError for one that is damaged, or that nothing can be
    trained with: no vocabulary, an end of document that is no token."""
    names = (SPECIAL, SETTINGS, ADDED, *MODEL)
    files = {name: read_object(folder / name, AGAIN) for name in names if os.path.lexists(folder / name)}
    settings = files.get(SPECIAL, {}) | files.get(SETTINGS, {})
    with refusing(folder, AGAIN):
        plain: Tokenizer | None = None  # what tokenizer.json says by itself
        if os.path.lexists(folder / "tokenizer.json"):
            content = read_text(folder / "tokenizer.json", AGAIN)
            try:
                plain = Tokenizer.from_str(content)
            except Exception as error:
                raise ValueError(f"tokenizer.json cannot be read: {error}".splitlines()[0]) from error
        saved_here = plain and [*files] == [SETTINGS] and read_text(folder / SETTINGS, AGAIN) == written(settings)
        backend = plain if plain and saved_here else _specified(folder, plain)
        if not backend.get_vocab(with_added_tokens=False):
            raise ValueError("its vocabulary is empty")
        vocabulary, eos = backend.get_vocab(with_added_tokens=True), token_text(settings.get("eos_token"))
        ends = [files.get(name, {}).get("eos_token_id") for name in MODEL]  # the model's files may know it
        end = next((it[0] if isinstance(it, list) else it for it in ends if it not in (None, [])), None)
        named, known = (end, [*vocabulary.values()]) if eos is None else (eos, [*vocabulary])
        if named is not None and named not in known:
            raise ValueError(f"its end of document, {named!r:.60}, is none of its tokens")
    return TextTokenizer(backend, {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None}, end)


def _specified(folder: Path, plain: Tokenizer | None) -> Tokenizer:
    """The tokenizer that AutoTokenizer makes of a folder; `plain`, if it has the same effect, or if there is none."""
    try:
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: Tokenizer = theirs.backend_tokenizer
    except Exception as error:  # the library raises whatever it likes
        if plain is not None:
            return plain
        raise ValueError(f"holds no tokenizer.json that transformers can load: {error}".splitlines()[0]) from error
    return plain if plain is not None and _effect(plain) == _effect(backend) else backend


def _effect(backend: Tokenizer) -> Any:
    """Everything on which the ids of a text depend, special tokens being text. Fields left empty and the places of
    tokens in the text are no part of it."""

    def significant(part: dict[str, Any]) -> dict[str, Any]:
        return {key: it for key, it in part.items() if it not in (None, "") and key != "trim_offsets"}

    spec = json.loads(backend.to_str(), object_hook=significant)
    known = backend.get_vocab(with_added_tokens=False)
    added = [token for token in spec["added_tokens"] if not token["special"] or token["content"] not in known]
    return [spec.get(part) for part in ("normalizer", "pre_tokenizer", "decoder", "model")], added
