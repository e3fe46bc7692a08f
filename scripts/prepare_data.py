"""Text to token files, and a check of token files: a thin command over megalite.data.

python scripts/prepare_data.py books/*.txt --tokenizer bpe --output tokens/books
python scripts/prepare_data.py --hub org/name --tokenizer ./my-tokenizer --output tokens/name
python scripts/prepare_data.py --verify tokens/books --vocab-size 4096
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.bounds import unusable
from megalite.config.problems import REFUSED, Problem, UserError
from megalite.config.schema import Config, DataConfig
from megalite.train.terminal import Terminal

FLAGS = {  # what this command calls the settings of a run
    "data=text data.path=FOLDER": "the input FOLDER",
    "data.path": "input",
    "data.text_column": "--column",
    "data.subset": "--subset",
    "data.split": "--split",
    "data.cache_dir": "--output",
    "tokenizer=": "--tokenizer=",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = DataConfig()
    parser.add_argument("inputs", nargs="*", help="txt, jsonl or parquet files, folders of them, or quoted globs")
    parser.add_argument("--hub", metavar="NAME", help="a data set of the Hugging Face hub instead of local files")
    parser.add_argument("--subset", help="configuration of the hub data set")
    parser.add_argument("--split", default=default.split, help="split of the hub data set (default: %(default)s)")
    parser.add_argument("--streaming", action="store_true", help="read the hub data set without storing it")
    parser.add_argument("--column", default=default.text_column, help="column with the text (default: %(default)s)")
    parser.add_argument(
        "--tokenizer", default=Config().tokenizer, help="bpe, byte, char, a folder or a name on the hub"
    )
    parser.add_argument("--bpe-vocab-size", type=int, default=default.bpe_vocab_size, help="default: %(default)s")
    parser.add_argument("--workers", type=int, help="processes that tokenize (default: one per core)")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json and .tokenizer/")
    parser.add_argument("--verify", type=Path, metavar="PREFIX", help="scan a whole token file instead of making one")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="--verify: ids must be below N (default: PREFIX.json's)"
    )
    return parser.parse_args(arguments)


def check_arguments(options: argparse.Namespace) -> None:
    """Refuse contradictions before any work."""
    problems = []
    if not options.verify and bool(options.inputs) == bool(options.hub):
        problems.append(Problem("inputs", options.inputs, "give files or --hub NAME, one of the two", "see --help"))
    if not options.verify and not options.output:
        problems.append(Problem("--output", None, "is needed", "--output PREFIX"))
    if options.output and options.output.suffix in (".bin", ".idx"):
        rule = "is a PREFIX: .bin, .idx and others are added"
        problems.append(Problem("--output", str(options.output), rule, f"--output {options.output.with_suffix('')}"))
    if options.workers is not None and options.workers < 1:
        problems.append(Problem("--workers", options.workers, "must be at least 1", "leave it out for one per core"))
    if options.bpe_vocab_size < 258:
        problems.append(
            Problem("--bpe-vocab-size", options.bpe_vocab_size, "must be at least 258", "4096, for example")
        )
    if options.vocab_size is not None and options.vocab_size < 1:
        problems.append(Problem("--vocab-size", options.vocab_size, "must be at least 1", "that of the tokenizer"))
    names = {"inputs": options.inputs, "--hub": options.hub, "--tokenizer": options.tokenizer}
    names |= {"--output": options.output, "--verify": options.verify}
    problems += [problem for name, value in names.items() if value and (problem := unusable(name, value))]
    if problems:
        raise UserError(problems)


def run_prepare(options: argparse.Namespace, terminal: Terminal) -> list[str]:
    """Make the token files; returns what to say of them."""
    from megalite.data.prepare import prepare_file
    from megalite.data.sources import Source
    from megalite.data.summary import summary

    paths = (options.hub,) if options.hub else tuple(options.inputs)
    kind = "hf" if options.hub else "text"
    source = Source(kind, paths, options.column, options.subset, options.split, options.streaming)
    config = Config(tokenizer=options.tokenizer)
    config.data.bpe_vocab_size, config.data.workers = options.bpe_vocab_size, options.workers
    prepare_file(source, config, options.output, terminal.preparing)
    return summary(options.output)


def run_verify(options: argparse.Namespace, terminal: Terminal) -> list[str]:
    """Scan a token file; returns what to say of it."""
    from megalite.data.verify import verify

    file = verify(options.verify, options.vocab_size, terminal.checking)
    return [f"{options.verify}: sound; {file.documents:,} documents, {len(file.tokens):,} tokens"]


def in_flags(message: str) -> str:
    """The message in this command's words."""
    for setting, flag in FLAGS.items():
        message = message.replace(setting, flag)
    return message


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check_arguments(options)
        with closing(Terminal(sys.stderr, interactive=sys.stderr.isatty())) as terminal:
            lines = run_verify(options, terminal) if options.verify else run_prepare(options, terminal)
    except UserError as error:
        print(in_flags(error.render()), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("stopped; the same command continues where it was", file=sys.stderr)
        return 130
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
