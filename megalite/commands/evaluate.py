"""Loss, perplexity and bits per byte of a model on data. See docs/huggingface.md.

python scripts/evaluate.py runs/mine                                  # on what the run held out: its val_loss
python scripts/evaluate.py runs/mine data=text data.path=book.txt
python scripts/evaluate.py exported data=stdlib --max-tokens 100000

MODEL is a run folder (its newest checkpoint, or --step) or a folder of a transformers GPT-2, Llama or Qwen3 model.
OVERRIDES are those of pretrain_gpt.py that concern data and device. Data that is named is
evaluated whole. Exit status: 0 evaluated, 2 refused.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.errors.problems import REFUSED, UserError, to_stderr
from megalite.hf.evaluation_request import read_request
from megalite.launch.environment import read_environment
from megalite.prepare.hub import ask_early


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the overrides."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s MODEL [options] [OVERRIDES ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run folder, or a folder of a transformers model")
    parser.add_argument("--step", type=int, help="of a run's checkpoint (default: the newest)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="predict only the first N tokens of the data")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in full precision")
    return parser.parse_known_args(arguments)


class Progress:
    """A line on stderr every ten seconds."""

    def __init__(self) -> None:
        self.begin = self.told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.told < 10:
            return
        self.told = now
        left = (now - self.begin) * (total - done) / done
        print(f"{done:,} of {total:,} tokens, about {max(0, left):.0f} s left", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        request = read_request(overrides, batch_size=options.batch_size, max_tokens=options.max_tokens)
        ask_early(request.config, read_environment(os.environ))
        from megalite.hf.evaluate_saved import evaluate_saved
        from megalite.prepare import prepare

        found = evaluate_saved(
            options.model,
            request,
            prepare,
            lambda warning: to_stderr(f"megalite: {warning}"),
            Progress(),
            options.step,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130
    print(json.dumps(asdict(found)) if options.json else "\n".join(lines(found)))
    return 0


def lines(found: Any) -> list[str]:
    """What people read."""
    step = "" if found.step is None else f" after step {found.step:,}"
    rows = [
        ("model", f"{found.model}{step}, in {found.precision}"),
        ("data", found.data),
        ("predicted", f"{found.tokens:,} tokens, {found.seq_length:,} at a time"),
        ("loss", f"{found.loss:.4f} nats per token"),
        ("perplexity", f"{found.perplexity:.2f}"),
    ]
    if found.bits_per_byte is not None:
        rows.append(("bits per byte", f"{found.bits_per_byte:.4f} ({found.bytes_per_token:.3f} bytes per token)"))
    return [f"{name:<14} {words}" for name, words in rows]
