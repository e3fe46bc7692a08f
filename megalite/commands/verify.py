"""Whether a layout trains like one process: your config, made small, on CPU processes and on one, in fp64.

python scripts/verify_layout.py model=gpt2 parallel.tp=4
python scripts/verify_layout.py --dp 2 model=llama3_8b parallel.tp=2 parallel.sequence_parallel=false
python scripts/verify_layout.py --world-size 64 model=gpt3_175b parallel.tp=8 train.global_batch_size=64

OVERRIDES are those of pretrain_gpt.py. The model shrinks, its features and what divides what stay; above 8 ranks each
axis shrinks to 2. No data is read, no GPU is used, nothing is written.
Exit status: 0 the layout computes the same, 1 it does not (or a rank failed or hung), 2 refused.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from megalite.errors.problems import REFUSED, UserError
from megalite.verify.processes import RankFailure
from megalite.verify.verify import TIMEOUT_S, load, table, verify


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the words for the launcher."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--world-size N | --dp N] [--timeout SECONDS] [OVERRIDES ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of your job; data parallelism is the rest")
    parser.add_argument(
        "--dp", type=int, metavar="N", help="data-parallel size (default: 2 where that makes at most 8 ranks, else 1)"
    )
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="a hang is a failure (default: %(default)g)"
    )
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    begin = time.monotonic()
    try:
        config, world_size = load(overrides, options.world_size, options.dp)
        verdict = verify(config, world_size, timeout_s=options.timeout)
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except RankFailure as failure:
        print(f"FAIL: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for line in table(verdict):
        print(line)
    print(f"({time.monotonic() - begin:.1f} s)")
    return 0 if verdict.passed else 1
