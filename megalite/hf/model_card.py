"""README.md of an exported model: what it is, what it was trained on, and how well it does.

A function of the run's settings and figures; layout, device, time and the paths of a machine are left out, so that runs
that trained the same model have the same card.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from megalite.config.families import ARCHITECTURE
from megalite.config.schema import Config, DataConfig
from megalite.model.flops import parameter_count

_FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- megalite
- {family}
---
"""
_LOSSES = {  # figures of metrics.jsonl, per token in nats
    "loss": "training, at the last step that was logged",
    "val_loss": "validation",
    "val_perplexity": "validation perplexity",
    "val_bits_per_byte": "validation bits per byte",
}
_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
tokens = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50, do_sample=True)[0]))
```

The tokenizer adds nothing to a text, as in training, where every document was followed by the end-of-document token if
the tokenizer has one.
"""
_USE_WITHOUT_TOKENIZER = """The tokens were prepared elsewhere and their tokenizer was not known to the training: load
the model with `AutoModelForCausalLM.from_pretrained` and use the tokenizer that made them.
"""


def model_card(
    config: Config, family: str, *, step: int, tokens: int, data: str, figures: Mapping[str, float], has_tokenizer: bool
) -> str:
    """Markdown with the hub's front matter.

    `config` is resolved; `tokens` were trained on in `step` steps; `data` describes it in words; of `figures`, named as
    in metrics.jsonl, those that are known are told.
    """
    model, train, optimizer, rate = config.model, config.train, config.optimizer, config.lr
    heads = f"{model.num_attention_heads} of {model.head_size}, {model.num_key_value_heads} key-value"
    decay = f"{rate.schedule} over {train.steps:,} steps, {rate.warmup_steps:,} of warm-up, least {rate.min_lr:g}"
    begun = config.checkpoint.init_from
    shape = [
        ("layers", f"{model.num_layers:,}"),
        ("width", f"{model.hidden_size:,}, MLP {model.ffn_hidden_size:,}"),
        ("attention heads", heads),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("sequence length in training", f"{train.seq_length:,}"),
    ]
    training = [
        ("data", "; ".join(word for word in (_where_from(config.data), data) if word)),
        ("held out for validation", f"{100 * config.data.validation_fraction:g} % of it, from the end"),
        ("tokens", f"{tokens:,}"),
        ("steps", f"{step:,}"),
        ("batch", f"{train.global_batch_size:,} sequences of {train.seq_length:,} tokens"),
        ("start", f"seed {config.seed}" if begun is None else f"the weights of {Path(begun).name}"),
        ("optimizer", f"AdamW, betas {optimizer.betas}, weight decay {optimizer.weight_decay:g}"),
        ("learning rate", f"{optimizer.lr:g}, {decay}"),
        ("precision", config.precision),
    ]
    known = [(words, figures[name]) for name, words in _LOSSES.items() if figures.get(name) is not None]
    losses = [(words, f"{value:.4f}" if math.isfinite(value) else "not finite") for words, value in known]
    parts = [
        _FRONT_MATTER.format(family=family),
        f"# {model.name}\n\n"
        f"A {ARCHITECTURE[family]} with {parameter_count(model):,} parameters, trained with megalite "
        f"for {step:,} steps on {tokens:,} tokens. It continues text; it was not taught to follow instructions.\n",
        "## Model\n\n" + _table(shape),
        "## Training\n\n" + _table(training),
        "## Losses\n\n"
        + (f"{_table(losses)}\nLosses are means per token, in nats.\n" if losses else "None were recorded.\n"),
        "## Use\n\n" + (_USE if has_tokenizer else _USE_WITHOUT_TOKENIZER),
    ]
    return "\n".join(parts)


def _where_from(data: DataConfig) -> str:
    """The data's name: of the hub's data sets whole, of local files without their folders."""
    paths = [str(path) for path in (data.path if isinstance(data.path, list) else [data.path or ""])]
    if data.source == "hf":
        return ", ".join([*paths, *([data.subset] if data.subset else []), data.split])
    return ", ".join(Path(path).name for path in paths)


def _table(rows: list[tuple[str, str]]) -> str:
    escaped = [(name, " ".join(words.replace("|", "&#124;").replace("<", "&lt;").split())) for name, words in rows]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {words} |" for name, words in escaped)]) + "\n"
