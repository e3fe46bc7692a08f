"""Whether a layout trains like one process: your config, made small, on CPU processes and on one, in fp64.

python -m megalite verify --dp 2 model=llama3_8b parallel.tp=2 parallel.sequence_parallel=false
python -m megalite verify --world-size 64 model=gpt3_175b parallel.tp=8 train.global_batch_size=64

The model shrinks, its features and what divides what stay; above 8 ranks each axis shrinks to its least factor, mostly
2. No data is read, no GPU is used, nothing stays.
Exit status: 0 the layout computes the same, 1 it does not (or a rank failed or hung), 2 refused.
"""

from argparse import Namespace

from megalite.commands.command import RANKS, WORLD_SIZE, Shown, command, option
from megalite.commands.train import train_rank
from megalite.config.arguments import number_from
from megalite.config.schema import A_YEAR_S
from megalite.errors.problems import to_stderr
from megalite.verify.running import RunFailure
from megalite.verify.shrink import load

SECONDS = number_from(0, A_YEAR_S, above=True, whole=False)


@command(
    WORLD_SIZE,
    option("--dp", **RANKS, help="data-parallel size (default: 2 where that makes at most 8 ranks)"),
    option("--timeout", type=SECONDS, default=300.0, metavar="S", help="a hang is a failure (default: %(default)g)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    config, world_size = load(overrides, options.world_size, options.dp)
    from megalite.verify import verify  # and torch

    try:
        lines, equal = verify.verify(config, world_size, train_rank, options.timeout)
    except RunFailure as failure:
        words, status = failure.args
        to_stderr(words)
        return Shown(status=status)
    return Shown(lines, 0 if equal else 1)
