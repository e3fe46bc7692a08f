"""A run's tokenizer as the files that AutoTokenizer reads, in transformers 4.57 as in 5, with the ids of training.

Training adds nothing to a text but the end of each document. So what a tokenizer of others puts before or behind every
text (a template of special tokens, which this model has never seen) is left out, and a text begins, where something
must stand before it, with the end of the document before.
"""

import json
from typing import Any

from megalite.data.tokenizers import TextTokenizer

# The class of both versions; the one that 5 writes by itself, 4.57 does not know.
_CLASS = "PreTrainedTokenizerFast"
_ADDS_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


def tokenizer_files(tokenizer: TextTokenizer, context_length: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json by name; `context_length` is the longest text that is not warned of."""
    spec = json.loads(tokenizer.backend.to_str())
    spec["post_processor"] = _without_added_tokens(spec.get("post_processor"))
    settings = {"clean_up_tokenization_spaces": False} | tokenizer.settings
    settings |= {"tokenizer_class": _CLASS, "model_max_length": context_length}
    if tokenizer.end_of_document is not None:
        end = tokenizer.backend.id_to_token(tokenizer.end_of_document)
        settings |= {"bos_token": end, "eos_token": end}
    contents = {"tokenizer.json": spec, "tokenizer_config.json": settings}
    return {name: _as_json(content) for name, content in contents.items()}


def _without_added_tokens(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is left of a post-processor is what only concerns offsets."""
    if processor is None or processor["type"] in _ADDS_TOKENS:
        return None
    if processor["type"] != "Sequence":
        return processor
    kept = [_without_added_tokens(part) for part in processor["processors"]]
    return processor | {"processors": [part for part in kept if part is not None]}


def _as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
