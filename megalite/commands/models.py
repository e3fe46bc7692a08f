"""What is done before and after training: `megalite prepare`, `evaluate`, `generate`, `export` and `report`.

torch is imported once the words are known to be right.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megalite.commands.command import COUNT, Shown, command, option
from megalite.config.arguments import number_from
from megalite.config.compose import load_part
from megalite.config.overrides import typed
from megalite.config.rule import unusable_path
from megalite.config.schema import Config
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect, plain, refuse, to_stderr
from megalite.observe.report.page import write_report
from megalite.observe.terminal import Terminal

MODEL = option("model", type=Path, metavar="MODEL", help="a run folder, or a folder of a transformers model")
STEP = option("--step", type=number_from(0), metavar="N", help="of a run's checkpoint (default: the newest)")
EMA = option("--ema", action="store_true", help="the averaged weights of a run (optimizer.ema_half_life_steps)")
PROBABILITY = number_from(0, 1, above=True, whole=False)
PREPARED = (
    *("data", "tokenizer", "data.path", "data.subset", "data.split", "data.streaming", "data.text_column"),
    *("data.bpe_vocab_size", "data.cache_dir", "data.workers"),
)


@command(
    option("--output", type=Path, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json and .tokenizer/"),
    option("--verify", action="store_true", help="scan whole token files instead of making one"),
)
def prepare(options: Namespace, overrides: list[str]) -> Shown:
    """Text to token files, and a check of token files.

    python -m megalite prepare data=text data.path='books/*.txt' --output tokens/books
    python -m megalite prepare data=hf data.path=org/name tokenizer=./my-tokenizer --output tokens/name
    python -m megalite prepare data=tokens data.path=tokens/books model.vocab_size=4096 --verify

    OVERRIDES are those of pretrain_gpt.py that concern data and tokenizer.
    """
    output, verify, problems = options.output, options.verify, list[Problem]()
    if verify == (output is not None):
        given, rule = str(output or NO_VALUE), "either that or --verify is needed"
        problems.append(Problem("--output", given, rule, "--output PREFIX"))
    if output and (problem := unusable_path("--output", output)):
        problems.append(problem)
    if output and output.name in ("", ".."):
        problems.append(Problem("--output", str(output), "is a folder: it names no file", "--output tokens/corpus"))
    part = ("--verify", ("data", "data.path", "model.vocab_size")) if verify else ("preparing data", PREPARED)
    config = collect(lambda: load_part(overrides, *part), problems) or Config()
    if not problems and verify != (config.data.source == "tokens"):
        hint = "data=tokens data.path=PREFIX" if verify else "data=text, data=hf or data=stdlib"
        rule = "token files are prepared already, and --verify is for them"
        problems.append(Problem("data", config.data.source, rule, hint))
    refuse(problems)
    terminal = Terminal(sys.stderr)
    try:
        return Shown([*(_check(config, terminal) if verify else _make(config, output, terminal))])
    except KeyboardInterrupt:
        to_stderr("stopped; the same command continues where it was")
        raise


def _make(config: Config, output: Path, terminal: Terminal) -> Iterator[str]:
    """Make the token files; say what they hold, and how to train on them."""
    from megalite.data.token_file import TokenFile, with_suffix
    from megalite.data.tokenizers import load_tokenizer
    from megalite.prepare.prepare import prepare_file
    from megalite.prepare.sources import sources_of

    source, *others = sources_of(config.data)
    if others and source.kind == "hf":
        hint = "prepare each by itself, and train on the list of files"
        raise UserError(Problem("data.path", config.data.path, "one token file is made of one data set", hint))
    source = replace(source, paths=tuple(path for part in (source, *others) for path in part.paths))
    prepare_file(source, config, output, terminal.preparing)
    file = TokenFile.open(output)
    facts, end = file.facts, load_tokenizer(with_suffix(output, ".tokenizer")).end_of_document
    counts = f"{file.counts}, {facts.bytes:,} bytes, {facts.bytes / len(file.tokens):.3f} bytes per token"
    yield f"{output}: {counts}, vocabulary {facts.vocab_size:,} ({file.tokens.dtype})"
    no_end = "the tokenizer has no end-of-document token: nothing marks where one document ends"
    yield no_end if end is None else f"every document ends with token {end:,}"
    if facts.skipped_documents:
        yield f"skipped {facts.skipped_documents:,} rows without text"
    yield f"train on it: python pretrain_gpt.py data=tokens {typed('data.path', str(output))}"


def _check(config: Config, terminal: Terminal) -> Iterator[str]:
    """Scan token files; say what they hold."""
    from megalite.data.open import paths_of
    from megalite.prepare.tokenizing import verify

    for path in paths_of(config.data):
        file = verify(Path(path), config.model.vocab_size, terminal.checking)
        yield f"{path}: sound; {file.counts}"


@command(
    MODEL,
    STEP,
    EMA,
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

    rows, most = options.batch_size, options.max_tokens
    found = evaluate_saved(options.model, overrides, options.step, rows, most, ema=options.ema)
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
    EMA,
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
    saved = open_model(options.model, options.step, ema=options.ema)
    texts = texts_of(saved, options.prompt, config, sampling)
    if options.json:
        return Shown(json.dumps({"prompt": prompt, "text": text}) for prompt, text in texts)
    count = len(options.prompt) * options.num_samples
    heads = (f"--- {at} of {count} ---\n" if count > 1 else "" for at in range(1, count + 1))
    return Shown(head + text for head, (_, text) in zip(heads, texts, strict=True))


@command(
    option("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder"),
    option("out", type=Path, metavar="OUT", help="the folder to write, new or empty"),
    STEP,
    EMA,
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
    model = open_model(options.run_dir, options.step, ema=options.ema)
    step = export_checkpoint(model, options.out, precision, options.max_shard_size)
    without = "" if model.tokenizer else ", without a tokenizer: the run does not know the one that made its tokens"
    weights = ", averaged weights" if model.ema else ""
    return Shown([f"{options.out}: {model.config.model.name} after step {step}{weights}{without}"])


@command(
    option("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run"),
    option("--out", type=Path, metavar="FILE", help="where to (default: RUN_DIR/report.html, or comparison.html here)"),
    overrides=False,
)
def report(options: Namespace, overrides: list[str]) -> Shown:
    """Draws the report of a run again, or compares several runs on common axes.

    python -m megalite report runs/first runs/second --out comparison.html

    One folder: its report.html. Several: comparison.html, here. A FILE that ends in .svg gets a picture of the
    validation loss alone, or of the training loss where one of the runs has no other. A run may go on meanwhile.
    """
    return Shown([str(write_report(options.runs, options.out))])
