"""Text to token files, and a check of token files: a thin command over megalite.data.

python scripts/prepare_data.py books/*.txt --tokenizer bpe --output tokens/books
python scripts/prepare_data.py --hub org/name --tokenizer ./my-tokenizer --output tokens/name
python scripts/prepare_data.py --verify tokens/books --vocab-size 4096
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.config.problems import REFUSED, Problem, UserError
from megalite.config.schema import Config, DataConfig

FLAGS = {  # what this command calls the settings of a run
    "data=text data.path=FOLDER": "the input FOLDER",
    "data.path": "input",
    "data.text_column": "--column",
    "data.subset": "--subset",
    "data.split": "--split",
    "data.cache_dir": "--output",
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
    if options.workers is not None and options.workers < 1:
        problems.append(Problem("--workers", options.workers, "must be at least 1", "leave it out for one per core"))
    if options.bpe_vocab_size < 258:
        problems.append(
            Problem("--bpe-vocab-size", options.bpe_vocab_size, "must be at least 258", "4096, for example")
        )
    if options.vocab_size is not None and options.vocab_size < 1:
        problems.append(Problem("--vocab-size", options.vocab_size, "must be at least 1", "that of the tokenizer"))
    if problems:
        raise UserError(problems)


def run_prepare(options: argparse.Namespace) -> None:
    from megalite.data.prepare import prepare_file
    from megalite.data.sources import Source

    paths = (options.hub,) if options.hub else tuple(options.inputs)
    kind = "hf" if options.hub else "text"
    source = Source(kind, paths, options.column, options.subset, options.split, options.streaming)
    config = Config(tokenizer=options.tokenizer)
    config.data.bpe_vocab_size, config.data.workers = options.bpe_vocab_size, options.workers
    line = ProgressLine("bytes")
    facts = prepare_file(source, config, options.output, lambda done, total, *_: line.show(done, total))
    line.end()
    bytes_per_token = facts["bytes"] / facts["tokens"]
    print(
        f"{options.output}: {facts['documents']:,} documents, {facts['tokens']:,} tokens, {facts['bytes']:,} bytes, "
        f"{bytes_per_token:.3f} bytes per token, vocabulary {facts['vocab_size']:,}"
    )
    if facts["skipped_documents"]:
        print(f"skipped {facts['skipped_documents']:,} rows without text")


def run_verify(options: argparse.Namespace) -> None:
    from megalite.data.verify import verify

    line = ProgressLine("tokens")
    file = verify(options.verify, options.vocab_size, line.show)
    line.end()
    print(f"{options.verify}: sound; {file.documents:,} documents, {len(file.tokens):,} tokens")


def in_flags(message: str) -> str:
    """The message in this command's words."""
    for setting, flag in FLAGS.items():
        message = message.replace(setting, flag)
    return message


class ProgressLine:
    """Done, in all, and the time left: a line that is rewritten on a terminal, one in ten seconds elsewhere."""

    def __init__(self, unit: str) -> None:
        self.unit, self.begin, self.shown = unit, time.monotonic(), time.monotonic()
        self.terminal = sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = now
        left = f", {(now - self.begin) * (total - done) / done:.0f} s left" if 0 < done <= total else ""
        share = f" ({100 * done / total:.0f} %)" if total else ""
        text = f"{done:,} of {total:,} {self.unit}{share}{left}" if total else f"{done:,} {self.unit}"
        print(
            f"\r{text:<70}" if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        if self.terminal:
            print("\r" + " " * 70, end="\r", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check_arguments(options)
        if options.verify:
            run_verify(options)
        else:
            run_prepare(options)
    except UserError as error:
        print(in_flags(error.render()), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("stopped; the same command continues where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
