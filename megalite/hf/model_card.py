"""README.md of an exported model: what it is, what it was trained on, and how well it does.

model_card.md is its text. It is a function of the run's settings and metrics; layout, device, time and the paths of a
machine are left out, so that runs that trained the same model have the same card.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from megalite.hf.families.family import Family
from megalite.hf.saved_model import RunCheckpoint
from megalite.model.flops import active_parameters, parameter_count

TEXT = Path(__file__).with_suffix(".md")
LOSSES = {  # of metrics.jsonl, per token in nats
    "loss": "training, at the last step that was logged",
    "val_loss": "validation",
    "val_perplexity": "validation perplexity",
    "val_bits_per_byte": "validation bits per byte",
}


def model_card(run: RunCheckpoint, family: Family, metrics: Mapping[str, Any], *, has_tokenizer: bool) -> bytes:
    """Markdown with the hub's front matter. `metrics` are named as in metrics.jsonl."""
    config, data, begun = run.config, run.config.data, run.config.checkpoint.init_from
    paths = data.path if isinstance(data.path, list) else [data.path or ""]
    names = [*paths, data.subset, data.split] if data.source == "hf" else [Path(path).name for path in paths]
    known = {words: metrics[name] for name, words in LOSSES.items() if metrics.get(name) is not None}
    text = Environment(undefined=StrictUndefined, trim_blocks=True, finalize=in_a_table, keep_trailing_newline=True)
    card = text.from_string(TEXT.read_text(encoding="utf-8")).render(
        vars(config),
        config=config,
        step=run.found.step,
        tokens=run.state.progress.tokens,
        has_tokenizer=has_tokenizer,
        family=family,
        parameters=parameter_count(config.model),
        active=active_parameters(config.model),
        data="; ".join(filter(None, [", ".join(filter(None, names)), run.state.data.description])),
        start=f"the weights of {Path(begun).name}" if begun else f"seed {config.seed}",
        losses={words: f"{value:.4f}" if math.isfinite(value) else "not finite" for words, value in known.items()},
    )
    return card.encode()


def in_a_table(value: Any) -> str:
    """A number with its thousands marked, a text as one cell of a row."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.replace("|", "&#124;").replace("<", "&lt;").split())
