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

from megalite.commands.command import COUNT, MODEL, STEP, Shown, command, option
from megalite.errors.words import plain


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

    found = evaluate_saved(options.model, overrides, prepare, options.step, options.batch_size, options.max_tokens)
    if options.json:
        return Shown([json.dumps(found)])
    known = {name: value for name, value in found.items() if value is not None}
    return Shown([f"{name:<16} {plain(value)}" for name, value in known.items()])
