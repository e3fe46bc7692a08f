"""Facts that can be read off the JSON of a tokenizer (tokenizer.json), and the change by which no text spells a special
token."""

import json
from itertools import count
from typing import Any

from tokenizers import pre_tokenizers

Spec = dict[str, Any]
NEVER = "\ufdd0"  # no character by Unicode's rules: no text holds three of them around a number


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table): itself, or one from 256 on."""
    alphabet, hidden = set(pre_tokenizers.ByteLevel.alphabet()), count(256)
    return [chr(byte) if chr(byte) in alphabet else chr(next(hidden)) for byte in range(256)]


def mentions(spec: Spec, kind: str, *parts: str) -> bool:
    """Whether one of the `parts` of a tokenizer (its pre-tokenizer, say) is or holds a step of this kind."""
    return any(f'"{kind}"' in json.dumps(spec[part]) for part in parts)


def unknown_of(model: Spec) -> str | None:
    """The token that stands for all symbols that a model does not know."""
    number = model.get("unk_id")
    unknown: str | None = model.get("unk_token") if number is None else model["vocab"][number][0]
    return unknown


def drops_symbols(spec: Spec) -> bool:
    """Whether the model may meet a symbol that it has no token for: BPE passes over it without a word, and the error of
    WordLevel does not say where it is."""
    model = spec["model"]
    if model["type"] == "WordLevel":
        return model["unk_token"] not in model["vocab"]
    if model["type"] != "BPE" or model["unk_token"] is not None:
        return False
    affixes = model["continuing_subword_prefix"], model["end_of_word_suffix"]
    from_bytes = mentions(spec, "ByteLevel", "normalizer", "pre_tokenizer") and not any(affixes)
    letters = byte_letters() if from_bytes else [None]
    known = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else letters
    return not model["vocab"].keys() >= set(known)


def text_only(spec: Spec, hidden: set[str]) -> Spec:
    """`spec` in which no text spells the `hidden` tokens, as none spells control pieces of SentencePiece. A model
    that drops symbols gives the id beyond all others for them."""
    names = {token: f"{NEVER}{number}{NEVER * 2}" for number, token in enumerate(sorted(hidden))}
    model = dict(spec["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        token | {"content": names[token["content"]], "normalized": False} if token["content"] in names else token
        for token in spec["added_tokens"]
    ]
    if model["type"] == "BPE":
        prefix = model["continuing_subword_prefix"] or ""
        made = ((left, right, left + right.removeprefix(prefix)) for left, right in model["merges"])
        model["merges"] = [[left, right] for left, right, whole in made if not names.keys() & {left, right, whole}]
    if drops_symbols(spec | {"model": model}):  # an end may be a symbol
        model["vocab"] |= {token["content"]: token["id"] for token in added}  # else they are numbered anew
        model["unk_token"] = NEVER * 4
        model["vocab"][NEVER * 4] = 1 + max(model["vocab"].values())
    return spec | {"model": model, "added_tokens": added}
