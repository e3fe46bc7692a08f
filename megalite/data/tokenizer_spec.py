"""What can be read off the JSON of a tokenizer (tokenizer.json), and changed in it."""

import json
from collections.abc import Mapping
from itertools import count
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

Spec = dict[str, Any]
NEVER = "\ufdd0"  # no character by Unicode's rules: no text holds three of them around a number


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (GPT-2's table): itself, or one from 256 on."""
    alphabet, hidden = set(pre_tokenizers.ByteLevel.alphabet()), count(256)
    return [chr(byte) if chr(byte) in alphabet else chr(next(hidden)) for byte in range(256)]


def check_ids(name: str, ids: Mapping[str, Any]) -> None:
    """ValueError unless the `ids` of tokens that a file says are numbers near 0: libraries fill memory up to them."""
    bound = 8 * len(ids) + (1 << 20)
    for token, found in ids.items():
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < bound:
            raise ValueError(f"{name}: the id {found!r:.40} of {token!r:.40} is no number from 0 to {bound:,}")


def says_bytes(spec: Spec) -> bool:
    """Whether the text becomes `byte_letters` before the model sees it."""
    return '"ByteLevel"' in json.dumps([spec["normalizer"], spec["pre_tokenizer"]])


def unknown_of(model: Spec) -> str | None:
    """The token that stands for all symbols that a model does not know."""
    number = model.get("unk_id")
    unknown: str | None = model.get("unk_token") if number is None else model["vocab"][number][0]
    return unknown


def drops_symbols(spec: Spec) -> bool:
    """Whether the model may pass over a symbol without a word, as BPE does with what is none of its tokens."""
    model = spec["model"]
    if model["type"] != "BPE" or model["unk_token"] is not None:
        return False
    affixes = model["continuing_subword_prefix"], model["end_of_word_suffix"]
    letters = byte_letters() if says_bytes(spec) and not any(affixes) else [None]
    known = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else letters
    return not model["vocab"].keys() >= set(known)


def text_only(spec: Spec, hidden: set[str]) -> Spec:
    """`spec` in which no text spells the `hidden` tokens, as no text spells the control pieces of SentencePiece. A BPE
    model that drops symbols gives the id beyond all others for them."""
    names = {token: f"{NEVER}{number}{NEVER * 2}" for number, token in enumerate(sorted(hidden))}
    model = dict(spec["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        token | {"content": names.get(token["content"], token["content"]), "normalized": False}
        if token["content"] in names
        else token
        for token in spec["added_tokens"]
    ]
    if model["type"] == "BPE":
        made = ((left, right, left + right) for left, right in model["merges"])
        if prefix := model["continuing_subword_prefix"]:
            made = ((left, right, left + right.removeprefix(prefix)) for left, right, _ in made)
        model["merges"] = [[left, right] for left, right, whole in made if not names.keys() & {left, right, whole}]
        if drops_symbols(spec | {"model": model}):  # an end may be a symbol
            model["vocab"] |= {token["content"]: token["id"] for token in added}  # else they are numbered anew
            model["unk_token"] = NEVER * 4
            model["vocab"][NEVER * 4] = 1 + max(model["vocab"].values())
    return spec | {"model": model, "added_tokens": added}


def same_effect(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether both give the same ids for every text, special tokens being text."""
    return bool(_effect(one) == _effect(other))


def _effect(backend: Tokenizer) -> Any:
    spec, known = json.loads(backend.to_str()), backend.get_vocab(with_added_tokens=False)
    added = [token for token in spec["added_tokens"] if not token["special"] or token["content"] not in known]
    return [_said(spec[part]) for part in ("normalizer", "pre_tokenizer", "decoder", "model")], added


def _said(part: Any) -> Any:
    """A part without what means nothing for ids: a field left empty, places of tokens in the text."""
    if not isinstance(part, dict):
        return [*map(_said, part)] if isinstance(part, list) and part and isinstance(part[0], dict) else part
    return {name: _said(it) for name, it in part.items() if it not in (None, "") and name != "trim_offsets"}
