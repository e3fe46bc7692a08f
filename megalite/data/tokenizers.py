"""Turns text into token ids and back, always by a `tokenizers` model, so that transformers loads what we save.

The end-of-document token ends every document and never arises from its text, and no other special token does:
`<|endoftext|>` spelled out in a text is text. So texts are encoded by a tokenizer whose special tokens no text can
spell (`text_only`); what it cannot say is refused.

`byte` and `char` are such models, too; because they are plain tables, an array look-up gives the same ids, in a 14th
and a 60th of the time.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megalite.config.durable_files import write_atomically
from megalite.data.permutation import IntArray
from megalite.errors.problems import Problem, UserError

END = "<|endoftext|>"
KEPT_SETTINGS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "clean_up_tokenization_spaces")
NEVER = "\ufdd0"  # no character by Unicode's rules: no text holds three of them around a number


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
        self._symbols = _symbols(self.spec, self.end_of_document)
        special = {token["content"] for token in self.spec["added_tokens"] if token["special"]}
        named = special | {token_text(settings.get(name)) for name in KEPT_SETTINGS[:4]}
        self._hidden = {text for text in named if text in vocabulary and len(text) > 1}  # some pad with `!`
        if self.end_of_document is not None:
            self._hidden.add(self._names[self.end_of_document])
        self._refused = np.zeros(self.vocab_size + 1, dtype=bool)  # ids that no text may give
        self._refused[[vocabulary[text] for text in self._hidden]] = True
        self._refused[self.vocab_size] = True  # of a symbol that has no token
        model = self.spec["model"]  # an unknown symbol has its token, unless that is the end of a document
        unknown = vocabulary.get(model.get("unk_token")) if model.get("unk_id") is None else model["unk_id"]
        if unknown is not None and unknown != self.end_of_document:
            self._refused[unknown] = False

    @cached_property
    def identity(self) -> str:
        """A hash of everything, by which token files remember their tokenizer."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.spec, self.end_of_document], sort_keys=True).encode())

    @property
    def is_table(self) -> bool:
        """Whether each symbol, or byte, of a text is a token by itself: the tokenizer is `char` or `byte`."""
        return self._symbols is not None

    @property
    def name(self) -> str:
        """The setting of `tokenizer` for those made here, else the kind of the model; and the number of tokens."""
        kind = self.spec["model"]["type"] if self._symbols is None else "char" if len(self._symbols) else "byte"
        return f"{kind} tokenizer with {self.vocab_size:,} tokens"

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added."""
        return [int(token) for token in self.encode_many([text])[0]]

    def encode_many(self, texts: Sequence[str], place: Callable[[int], str] = lambda _: "") -> list[IntArray]:
        """The ids of each text, nothing added; several texts on several threads. UserError for what the tokenizer
        cannot say: `place` names the text of a number."""
        if self._symbols is not None:
            found = [_look_up(self._symbols, text) for text in texts]
        else:
            try:
                encodings = self._encoder.encode_batch_fast([*texts], add_special_tokens=False)
            except Exception as error:  # the library raises plain Exception: a symbol that it has no token for
                raise UserError(self._problem(f"cannot encode the text ({error})")) from error
            found = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
        for number, ids in enumerate(found):
            if self._refused[ids].any():
                encoding = self._encoder.encode(texts[number], add_special_tokens=False)
                at = int(np.flatnonzero(self._refused[encoding.ids])[0])
                (start, stop), token = encoding.offsets[at], encoding.ids[at]
                told = "no token" if token == self.vocab_size else f"only the special token {self._names[token]!r}"
                rule = f"has {told} for {texts[number][start:stop]!r:.40} (character {start:,}){place(number)}"
                raise UserError(self._problem(rule))
        return found

    def _problem(self, rule: str) -> Problem:
        return Problem("tokenizer", self.name, rule, "tokenizer=byte, bpe, or one for this text")

    @cached_property
    def _encoder(self) -> Tokenizer:
        """The same tokenizer, whose special tokens no text can spell."""
        backend = Tokenizer.from_str(json.dumps(text_only(self.spec, self._hidden)))
        backend.encode_special_tokens = True
        return backend

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

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def files(self, context_length: int | None = None) -> dict[str, bytes]:
        """tokenizer.json and tokenizer_config.json by name, which AutoTokenizer reads in transformers 4.57 as in 5.
        `context_length` is the longest text that is not warned of.

        A text begins there, where something must stand before it, with the end of the document before.
        """
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


def text_only(spec: dict[str, Any], hidden: set[str]) -> dict[str, Any]:
    """`spec` in which no text spells the `hidden` tokens, as none spells control pieces of SentencePiece.

    A model without a token for unknown symbols passes over them (BPE), or fails without their place (WordLevel). It
    gives the id beyond all others for them.
    """
    names = {token: f"{NEVER}{number}{NEVER * 2}" for number, token in enumerate(sorted(hidden))}
    added = [
        token | {"content": names[token["content"]], "normalized": False} if token["content"] in names else token
        for token in spec["added_tokens"]
    ]
    model = dict(spec["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        return spec | {"model": model, "added_tokens": added}
    model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model["type"] == "BPE":
        prefix = model["continuing_subword_prefix"] or ""
        made = ((left, right, left + right.removeprefix(prefix)) for left, right in model["merges"])
        model["merges"] = [[left, right] for left, right, whole in made if not names.keys() & {left, right, whole}]
    if model["type"] in ("BPE", "WordLevel") and model["unk_token"] not in model["vocab"]:
        model["vocab"] |= {token["content"]: token["id"] for token in added}  # else they are numbered anew
        model["unk_token"] = NEVER * 4
        model["vocab"][NEVER * 4] = 1 + max(model["vocab"].values())
    return spec | {"model": model, "added_tokens": added}


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
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend, {"eos_token": END})


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table): itself, or one from 256 on."""
    alphabet, hidden = set(pre_tokenizers.ByteLevel.alphabet()), count(256)
    return [chr(byte) if chr(byte) in alphabet else chr(next(hidden)) for byte in range(256)]


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


def _symbols(spec: dict[str, Any], end: int | None) -> npt.NDArray[np.uint32] | None:
    """Code points in the order of their ids for `char`; an empty array for `byte`; None for other tokenizers."""
    vocabulary = spec["model"].get("vocab")
    if not isinstance(vocabulary, dict) or (end is not None and end < len(vocabulary)):
        return None
    symbols = sorted(vocabulary) if spec["model"]["type"] == "WordLevel" else []
    ours = json.loads((_char_backend(symbols) if symbols else _byte_backend()).to_str())
    same = all(spec[part] == ours[part] for part in ("normalizer", "pre_tokenizer", "model", "added_tokens"))
    return np.array([*map(ord, symbols)], dtype=np.uint32) if same and all(len(it) == 1 for it in symbols) else None


def _look_up(symbols: npt.NDArray[np.uint32], text: str) -> IntArray:
    """The ids of `text`, one for each of the symbols, or for each byte where there are none; the id beyond all others
    for what is no symbol."""
    if not len(symbols):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    ids = np.searchsorted(symbols, points)
    return np.where(symbols[np.minimum(ids, len(symbols) - 1)] == points, ids, len(symbols))
