"""Loss, perplexity and bits per byte of a model on data. See docs/huggingface.md.

python -m megalite evaluate runs/mine                                  # on what the run held out: its val_loss
python -m megalite evaluate runs/mine data=text data.path=book.txt
python -m megalite evaluate exported data=stdlib --max-tokens 100000

MODEL is a run folder (its newest checkpoint, or --step) or a folder of a transformers model.
OVERRIDES are those of pretrain_gpt.py that concern data and device. Data that is named is
evaluated whole. Exit status: 0 evaluated, 2 refused.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megalite.commands.command import COUNT, MODEL, STEP, Progress, Shown, command, option, warn


@command(
    MODEL,
    STEP,
    option("--max-tokens", **COUNT, help="predict only the first N tokens of the data"),
    option("--batch-size", **COUNT, default=8, help="sequences at a time (default: %(default)s)"),
    option("--json", action="store_true", help="print one JSON object, in full precision"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    from megalite.hf.evaluate import evaluate_saved
    from megalite.prepare.prepare import prepare

    chosen = {name: getattr(options, name) for name in ("step", "batch_size", "max_tokens")}
    found = evaluate_saved(options.model, overrides, prepare, warn, Progress(), **chosen)
    return Shown([json.dumps(asdict(found))] if options.json else lines(found))


def lines(found: Any) -> Iterator[str]:
    """What people read."""
    step = "" if found.step is None else f" after step {found.step:,}"
    yield f"{'model':<14} {found.model}{step}, in {found.precision}"
    yield f"{'data':<14} {found.data}"
    yield f"{'predicted':<14} {found.tokens:,} tokens, {found.seq_length:,} at a time"
    yield f"{'loss':<14} {found.loss:.4f} nats per token"
    yield f"{'perplexity':<14} {found.perplexity:.2f}"
    if found.bits_per_byte is not None:
        yield f"{'bits per byte':<14} {found.bits_per_byte:.4f} ({found.bytes_per_token:.3f} bytes per token)"
