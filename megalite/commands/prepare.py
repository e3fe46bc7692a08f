"""Text to token files, and a check of token files: a command over megalite.prepare.

python scripts/prepare_data.py data=text data.path='books/*.txt' --output tokens/books
python scripts/prepare_data.py data=hf data.path=org/name tokenizer=./my-tokenizer --output tokens/name
python scripts/prepare_data.py data=tokens data.path=tokens/books model.vocab_size=4096 --verify

OVERRIDES are those of pretrain_gpt.py that concern data and tokenizer. Exit status: 0, or 2 refused.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from megalite.config.bounds import unusable
from megalite.config.part import load_part
from megalite.config.schema import Config
from megalite.errors.problems import REFUSED, Problem, UserError, collect
from megalite.observe.terminal import Terminal

READ_TO_VERIFY = ("data", "data.path", "model.vocab_size")
READ_TO_PREPARE = (
    "data",
    *(f"data.{name}" for name in ("path", "subset", "split", "streaming", "text_column")),
    *(f"data.{name}" for name in ("bpe_vocab_size", "cache_dir", "workers")),
    "tokenizer",
)

PLAIN = re.compile(r"(?!inf$|nan$)[a-z_./][\w./@+-]*", re.ASCII | re.IGNORECASE)  # special neither to Hydra nor a shell


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the overrides."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --output PREFIX | --verify [OVERRIDES ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--output", type=Path, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json and .tokenizer/")
    wanted.add_argument("--verify", action="store_true", help="scan whole token files instead of making one")
    return parser.parse_known_args(arguments)


def read(output: Path | None, overrides: list[str]) -> Config:
    """The config; refuses contradictions before any work. Without `output` the data is to be verified."""
    problems = []
    if output is not None and output.suffix in (".bin", ".idx"):
        rule = "is a PREFIX: .bin, .idx and others are added"
        problems.append(Problem("--output", str(output), rule, f"--output {output.with_suffix('')}"))
    if output is not None and (problem := unusable("--output", output)):
        problems.append(problem)
    doer, reads = ("preparing data", READ_TO_PREPARE) if output else ("--verify", READ_TO_VERIFY)
    config = collect(lambda: load_part(overrides, doer, reads), problems)
    if config is not None and output is None and config.data.source != "tokens":
        remedy = "data=tokens data.path=PREFIX"
        problems.append(Problem("data", config.data.source, "only token files can be verified", remedy))
    if config is not None and output is not None and config.data.source == "tokens":
        remedy = "data=text, data=hf or data=stdlib; or --verify instead of --output"
        problems.append(Problem("data", "tokens", "token files are prepared already", remedy))
    if problems or config is None:
        raise UserError(problems)
    return config


def run_prepare(config: Config, output: Path, terminal: Terminal) -> list[str]:
    """Make the token files; returns what to say of them."""
    from megalite.prepare.prepare import prepare_file
    from megalite.prepare.sources import not_read, sources_of

    source, *others = sources_of(config.data)
    if others and source.kind == "hf":
        rule, remedy = (
            "one token file is made of one data set",
            "prepare each by itself, and train on the list of files",
        )
        raise UserError(Problem("data.path", config.data.path, rule, remedy))
    source = replace(source, paths=tuple(path for part in (source, *others) for path in part.paths))
    prepare_file(source, config, output, terminal.preparing)
    return [*not_read([source]), *summary(output)]


def summary(prefix: Path) -> list[str]:
    """What the token file PREFIX holds, and how to train on it."""
    from megalite.data.token_file import TokenFile, with_suffix
    from megalite.data.tokenizers import load_tokenizer

    file = TokenFile.open(prefix)
    facts, tokenizer = file.facts(), load_tokenizer(with_suffix(prefix, ".tokenizer"))
    counts = f"{file.counts}, {facts.bytes:,} bytes"
    ratio = f"{facts.bytes / len(file.tokens):.3f} bytes per token"
    lines = [f"{prefix}: {counts}, {ratio}, vocabulary {tokenizer.vocab_size:,} ({file.tokens.dtype})"]
    if tokenizer.end_of_document is None:
        lines.append("the tokenizer has no end-of-document token: nothing marks where one document ends")
    else:
        lines.append(f"every document ends with token {tokenizer.end_of_document:,}")
    if facts.skipped_documents:
        lines.append(f"skipped {facts.skipped_documents:,} rows without text")
    return [*lines, f"train on it: python pretrain_gpt.py data=tokens {path_override(str(prefix))}"]


def path_override(path: str) -> str:
    """`data.path=PATH` as it is typed in a shell; quoted where Hydra or the shell would read something else into it."""
    if PLAIN.fullmatch(path) and yaml.safe_load(path) == path:  # no number, no null
        return f"data.path={path}"
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), path)
    return shlex.quote(f'data.path="{escaped}"')


def run_verify(config: Config, terminal: Terminal) -> list[str]:
    """Scan token files; returns what to say of them."""
    from megalite.data.open import paths_of
    from megalite.data.verify import verify

    lines = []
    for path in paths_of(config.data):
        file = verify(Path(path), config.model.vocab_size, terminal.checking)
        lines.append(f"{path}: sound; {file.counts}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        config = read(options.output, overrides)
        with closing(Terminal(sys.stderr, interactive=sys.stderr.isatty())) as terminal:
            lines = run_prepare(config, options.output, terminal) if options.output else run_verify(config, terminal)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("stopped; the same command continues where it was", file=sys.stderr)
        return 130
    print("\n".join(lines))
    return 0
