"""Text to token files, and a check of token files.

python -m megalite prepare data=text data.path='books/*.txt' --output tokens/books
python -m megalite prepare data=hf data.path=org/name tokenizer=./my-tokenizer --output tokens/name
python -m megalite prepare data=tokens data.path=tokens/books model.vocab_size=4096 --verify

OVERRIDES are those of pretrain_gpt.py that concern data and tokenizer. Exit status: 0, or 2 refused.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from megalite.commands.command import Shown, command, option
from megalite.config.compose import load_part
from megalite.config.overrides import typed
from megalite.config.schema import Config
from megalite.config.settings import unusable
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect, refuse, to_stderr
from megalite.observe.terminal import Terminal

PREPARED = (
    *("data", "tokenizer", "data.path", "data.subset", "data.split", "data.streaming", "data.text_column"),
    *("data.bpe_vocab_size", "data.cache_dir", "data.workers"),
)
path_override = partial(typed, "data.path")


@command(
    option("--output", type=Path, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json and .tokenizer/"),
    option("--verify", action="store_true", help="scan whole token files instead of making one"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    output, verify, problems = options.output, options.verify, list[Problem]()
    if verify == (output is not None):
        given, rule = str(output or NO_VALUE), "either that or --verify is needed"
        problems.append(Problem("--output", given, rule, "--output PREFIX"))
    if output and (problem := unusable("--output", output)):
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
        return Shown([*(check(config, terminal) if verify else make(config, output, terminal))])
    except KeyboardInterrupt:
        to_stderr("stopped; the same command continues where it was")
        raise


def make(config: Config, output: Path, terminal: Terminal) -> Iterator[str]:
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
    yield f"train on it: python pretrain_gpt.py data=tokens {path_override(str(output))}"


def check(config: Config, terminal: Terminal) -> Iterator[str]:
    """Scan token files; say what they hold."""
    from megalite.data.open import paths_of
    from megalite.prepare.tokenizing import verify

    for path in paths_of(config.data):
        file = verify(Path(path), config.model.vocab_size, terminal.checking)
        yield f"{path}: sound; {file.counts}"
