"""Which bucket holds which parameters, and who owns what of it: the gradient buffers of a run, as a table or a picture.

python scripts/buffers.py model=gpt2 tokenizer=gpt2 --dp 4
python scripts/buffers.py model=gpt2 tokenizer=gpt2 --dp 4 --picture buffers.svg
python scripts/buffers.py model=llama3_8b parallel.tp=2 train.global_batch_size=64 --world-size 128 --rank 5
python scripts/buffers.py model=gpt2 optimizer.bucket_size=5000000 optimizer.instances=2 --dp 8 --all

OVERRIDES are those of pretrain_gpt.py. No data is read, no GPU is used, nothing is written but the picture.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megalite.config.compose import load_config
from megalite.config.derive import derive_vocabulary
from megalite.config.parallel_rules import layout_request
from megalite.config.schema import Config
from megalite.errors.problems import REFUSED, Problem, UserError, collect
from megalite.layout.layout_rules import layout_of
from megalite.layout.ranks import ParallelLayout
from megalite.layout.summary import header_lines as layout_lines
from megalite.observe.screens import print_lines
from megalite.optim.rank_buffers import rank_buffers
from megalite.plan.buffers_picture import figure_of
from megalite.plan.buffers_table import StateTypes, bucket_lines, header_lines, owned_lines
from megalite.plan.drawing import picture_problems, save_picture
from megalite.verify.shrink import vocabulary_of
from megalite.verify.verify import load


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the words for the launcher."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--world-size N | --dp N] [--rank R] [--all] [--picture FILE] [OVERRIDES ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of your job; data parallelism is the rest")
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel size (default: 2)")
    parser.add_argument("--rank", type=int, metavar="R", help="whose buffers; also lists all ranges that it owns")
    parser.add_argument("--all", action="store_true", help="every line of a long table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw it, to a .png or .svg file")
    return parser.parse_known_args(arguments)


def read(options: argparse.Namespace, overrides: list[str]) -> tuple[Config, ParallelLayout]:
    """The config and its world; a UserError with everything that stands against it."""
    problems = [] if options.picture is None else picture_problems(options.picture, "--picture")
    loaded = collect(lambda: _load(overrides, options.world_size, options.dp), problems)
    if loaded is not None and options.rank is not None and not 0 <= options.rank < loaded[1]:
        remedy = "--rank 0" if loaded[1] == 1 else f"--rank 0 to {loaded[1] - 1}"
        problems.append(Problem("--rank", options.rank, f"there are {loaded[1]} ranks, counted from 0", remedy))
    if problems or loaded is None:
        raise UserError(problems)
    config, world_size = loaded
    return config, layout_of(layout_request(config, world_size))


def _load(overrides: list[str], world_size: int | None, dp: int | None) -> tuple[Config, int]:
    if (world_size, dp) in ((1, None), (None, 1)):  # nothing to verify in one process, but it has buffers
        with suppress(UserError):
            return load_config(overrides, 1), 1
    return load(overrides, world_size, 2 if world_size is None and dp is None else dp)


def assumed(config: Config) -> tuple[Config, list[str]]:
    """The config with what the device and the data would decide, and what was put in for them."""
    notes = []
    if config.precision == "auto":
        notes.append("precision=auto is taken as bf16")
        config = replace(config, precision="bf16")
    if config.model.vocab_size is None:
        config = derive_vocabulary(config, vocabulary_of(config))
        notes.append(f"model.vocab_size is taken as {config.model.vocab_size:,}: the tokenizer is not asked")
    return config, [f"{note} (set it to be exact)" for note in notes]


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        config, world = read(options, overrides)
        config, notes = assumed(config)
        buffers = rank_buffers(config, world, options.rank or 0)
        types = StateTypes(config.precision, config.optimizer.gradient_dtype, config.optimizer.moment_dtype)
        title = f"{config.model.name}, {layout_lines(world)[0]}, {config.precision}"
        header = header_lines(buffers, types)
        if options.picture is not None:
            save_picture(lambda: figure_of(buffers, [title, *header]), options.picture, "--picture")
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    print_lines([title, *header, *(f"note: {note}" for note in notes), ""])
    print_lines(bucket_lines(buffers, types, full=options.all))
    if options.rank is not None:
        print_lines(["", *owned_lines(buffers, full=options.all)])
    if options.picture is not None:
        print_lines(["", f"picture: {options.picture}"])
    return 0
