"""Trains a GPT: `python pretrain_gpt.py [name=value ...]`, or the same under torchrun or srun; see --help. Exit status:
0 finished or stopped after saving, 2 refused (said by rank 0), 130 interrupted before the start, else a failure."""

import os
import sys
import time

from megalite.config.problems import Problem, UserError, collect
from megalite.data.hub import ask_early
from megalite.parallel.cores import let_waiting_threads_sleep
from megalite.parallel.environment import claimed_rank, first_of_node, read_environment
from megalite.train.signals import ignore_stop_signals, notice_launcher_s_end

WAIT_FOR_RANK_ZERO_S = 5.0  # torchrun ends all ranks when the first one exits: rank 0 must have printed by then


def main(argv: list[str]) -> int:
    from megalite.config.arguments import wants_information
    from megalite.config.compose import load_config, show_information

    rank, problems = claimed_rank(os.environ), list[Problem]()
    if wants_information(argv):
        status = collect(lambda: show_information(argv) if rank == 0 else 0, problems)
        return refuse(UserError(problems), rank) if status is None else status
    environment = collect(lambda: read_environment(os.environ), problems)
    config = collect(lambda: load_config(argv, environment.world_size if environment else 1), problems)
    if environment is None or config is None:
        return refuse(UserError(problems), rank)
    notice_launcher_s_end(environment.launcher)  # during the imports, too: ranks without it wait for nobody
    let_waiting_threads_sleep(os.environ)
    ask_early(config, environment)
    from torch.distributed.elastic.multiprocessing.errors import record  # torch: from here on it takes seconds

    from megalite.train.run import run

    def train() -> int:  # refusals are caught inside record, which would report them as failures
        status = collect(lambda: run(config, environment), problems)
        return refuse(UserError(problems), rank) if status is None else status

    return record(train)() or 0


def refuse(error: UserError, rank: int) -> int:
    """Says what is wrong, once for all ranks, and gives the exit status."""
    if rank > 0:
        time.sleep(WAIT_FOR_RANK_ZERO_S)
    # Still there: rank 0 may be well, or missing. Each machine then says once what it alone may lack.
    if rank == 0 or any(it.alone or (it.here and first_of_node(os.environ)) for it in error.problems):
        print(error, file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    ignore_stop_signals()
    sys.exit(status)
