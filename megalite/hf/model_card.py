"""README.md of an exported model: what it is, what it was trained on, and how well it does.

model_card.md is its text. It is a function of the run's settings and figures; layout, device, time and the paths of a
machine are left out, so that runs that trained the same model have the same card.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from megalite.config.schema import Config, DataConfig
from megalite.hf.families import FAMILIES
from megalite.model.flops import active_parameters, parameter_count

TEXT = Path(__file__).with_suffix(".md")
LOSSES = {  # figures of metrics.jsonl, per token in nats
    "loss": "training, at the last step that was logged",
    "val_loss": "validation",
    "val_perplexity": "validation perplexity",
    "val_bits_per_byte": "validation bits per byte",
}


def model_card(
    config: Config, family: str, *, step: int, tokens: int, data: str, figures: Mapping[str, float], has_tokenizer: bool
) -> str:
    """Markdown with the hub's front matter. `config` is resolved; `figures` are named as in metrics.jsonl."""
    known = [(words, figures[name]) for name, words in LOSSES.items() if figures.get(name) is not None]
    begun = config.checkpoint.init_from
    text = Environment(undefined=StrictUndefined, trim_blocks=True, finalize=in_a_table, keep_trailing_newline=True)
    return text.from_string(TEXT.read_text(encoding="utf-8")).render(
        vars(config),
        config=config,
        step=step,
        tokens=tokens,
        has_tokenizer=has_tokenizer,
        family=family,
        architecture=FAMILIES[family].architecture,
        parameters=parameter_count(config.model),
        active=active_parameters(config.model),
        data="; ".join(word for word in (_where_from(config.data), data) if word),
        start=f"seed {config.seed}" if begun is None else f"the weights of {Path(begun).name}",
        losses=[(words, f"{value:.4f}" if math.isfinite(value) else "not finite") for words, value in known],
    )


def in_a_table(value: Any) -> str:
    """A number with its thousands marked, a text as one cell of a row."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.replace("|", "&#124;").replace("<", "&lt;").split())


def _where_from(data: DataConfig) -> str:
    """The data's name: of the hub's data sets whole, of local files without their folders."""
    paths = data.path if isinstance(data.path, list) else [data.path or ""]
    if data.source == "hf":
        return ", ".join([*paths, *([data.subset] if data.subset else []), data.split])
    return ", ".join(Path(path).name for path in paths)
