"""What is done with a run or a model of transformers: `megalite evaluate`, `generate`, `export` and `report`.

torch is imported once the words are known to be right.
"""

import json
from argparse import Namespace
from pathlib import Path

from megalite.commands.command import COUNT, Shown, command, option
from megalite.config.arguments import number_from
from megalite.config.compose import load_part
from megalite.errors.problems import Problem, plain, refuse
from megalite.observe.report.page import write_report

MODEL = option("model", type=Path, metavar="MODEL", help="a run folder, or a folder of a transformers model")
STEP = option("--step", type=number_from(0), metavar="N", help="of a run's checkpoint (default: the newest)")
PROBABILITY = number_from(0, 1, above=True, whole=False)


@command(
    MODEL,
    STEP,
    option("--max-tokens", **COUNT, help="predict only the first N tokens of the data"),
    option("--batch-size", **COUNT, default=8, help="sequences at a time (default: %(default)s)"),
    option("--json", action="store_true", help="print one JSON object, in full precision"),
)
def evaluate(options: Namespace, overrides: list[str]) -> Shown:
    """Loss, perplexity and bits per byte of a model on data.

    python -m megalite evaluate runs/mine                                  # on what the run held out: its val_loss
    python -m megalite evaluate exported data=text data.path=book.txt

    OVERRIDES are those of pretrain_gpt.py that concern data and device. Data that is named is evaluated whole.
    """
    from megalite.hf.inference import evaluate_saved

    found = evaluate_saved(options.model, overrides, options.step, options.batch_size, options.max_tokens)
    if options.json:
        return Shown([json.dumps(found)])
    return Shown([f"{name:<16} {plain(value)}" for name, value in found.items() if value is not None])


@command(
    MODEL,
    option("--prompt", action="append", required=True, help="how the text begins; may be given several times"),
    option("--max-new-tokens", type=number_from(1, 2**20), metavar="N", help="default: 100, or what there is room for"),
    option("--temperature", type=number_from(0, whole=False), default=0.8, help="0: the likeliest (default: 0.8)"),
    option("--top-k", type=number_from(0), default=50, help="0: all tokens (default: %(default)s)"),
    option("--top-p", type=PROBABILITY, default=1.0, help="1: all tokens (default: %(default)s)"),
    option("--num-samples", **COUNT, default=1, help="of each prompt (default: %(default)s)"),
    option("--json", action="store_true", help="print a JSON object a line: prompt and text"),
    STEP,
)
def generate(options: Namespace, overrides: list[str]) -> Shown:
    """Text from a model. Nothing is downloaded, and no code that comes with a model is run.

    python -m megalite generate exported --prompt "Once upon a time" --num-samples 3 --temperature 1 seed=7

    The same seed gives the same text.
    """
    hint = "--prompt 'Once upon a time'"
    refuse([Problem("--prompt", text, "there is nothing to continue", hint) for text in options.prompt if not text])
    config = load_part(overrides, "generating text", ("seed", "device", "precision"))
    from megalite.hf.inference import Sampling, texts_of
    from megalite.hf.saved_model import open_model

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.num_samples, options.max_new_tokens)
    texts = texts_of(open_model(options.model, options.step), options.prompt, config, sampling)
    if options.json:
        return Shown(json.dumps({"prompt": prompt, "text": text}) for prompt, text in texts)
    count = len(options.prompt) * options.num_samples
    heads = (f"--- {at} of {count} ---\n" if count > 1 else "" for at in range(1, count + 1))
    return Shown(head + text for head, (_, text) in zip(heads, texts, strict=True))


@command(
    option("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder"),
    option("out", type=Path, metavar="OUT", help="the folder to write, new or empty"),
    STEP,
    option("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: %(default)s)"),
)
def export(options: Namespace, overrides: list[str]) -> Shown:
    """A run as a folder that transformers loads: weights, tokenizer, model card.

    python -m megalite export runs/mine exported precision=bf16 --step 1000 --max-shard-size 2GB

    The precision is that of the run unless precision=NAME says otherwise. OUT is there whole or not at all.
    """
    precision = load_part(overrides, "exporting", ("precision",)).precision
    from megalite.hf.export import export_checkpoint, require_new
    from megalite.hf.saved_model import open_model

    require_new(options.out)  # before gigabytes are verified
    model = open_model(options.run_dir, options.step)
    step = export_checkpoint(model, options.out, precision, options.max_shard_size)
    without = "" if model.tokenizer else ", without a tokenizer: the run does not know the one that made its tokens"
    return Shown([f"{options.out}: {model.config.model.name} after step {step}{without}"])


@command(
    option("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run"),
    option("--out", type=Path, metavar="FILE", help="where to (default: RUN_DIR/report.html)"),
    overrides=False,
)
def report(options: Namespace, overrides: list[str]) -> Shown:
    """Draws the report of a run again, or compares several runs on common axes.

    python -m megalite report runs/first runs/second --out comparison.html

    One folder: its report.html. Several: comparison.html, here. A run may go on meanwhile.
    """
    return Shown([str(write_report(options.runs, options.out))])
