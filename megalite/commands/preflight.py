"""Measures the nodes of a job before it trains, and names those that are slow or wrong.

srun --ntasks-per-node 8 python -m megalite preflight --folder /scratch/runs
torchrun --nnodes 4 --nproc-per-node 8 ... -m megalite preflight --keep 4

Each node multiplies matrices, copies memory, writes to the folder of checkpoints, and exchanges data inside and with
its neighbours; each is compared with the median, its versions with those of most. --keep prints the names of the best N
nodes on stdout, for srun's --nodelist, and everything else on stderr. launch.preflight=true does the same at the start
of a training.
Exit status: 0 all nodes are well (or enough for --keep), 1 some are not, 2 refused.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megalite.commands.command import COUNT, Shown, command, option
from megalite.errors.problems import Problem, collect, to_stderr


@command(
    option("--folder", type=Path, default=Path("runs"), help="of checkpoints (default: %(default)s)"),
    option("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)"),
    option("--keep", **COUNT, help="so many nodes are to train"),
    overrides=False,
)
def measure(options: Namespace, overrides: list[str]) -> Shown:
    from megalite.launch.context import CPU, ParallelContext
    from megalite.launch.device import choose_device
    from megalite.launch.environment import read_environment
    from megalite.launch.preflight import best, judge, preflight, table
    from megalite.launch.startup import meet
    from megalite.layout.ranks import ParallelLayout

    environment, problems = read_environment(os.environ), list[Problem]()
    device = collect(lambda: choose_device(options.device, environment), problems) or CPU
    store = meet(environment, CPU, problems, None, timeout_s=600.0)  # whose GPUs are compared later
    context = ParallelContext(ParallelLayout(dp=environment.world_size), environment.rank, device, store=store)
    nodes = preflight(context, options.folder)
    if context.rank > 0:
        return Shown()
    faults, differences = judge(nodes)
    lines = [*table(nodes), f"--exclude={','.join(faults)}" if faults else "no node is known to be wrong"]
    if options.keep is None:
        return Shown(lines, status=int(bool(faults or differences)))
    well = len(nodes) - len(faults)
    lines += [f"--keep={options.keep}: only {well} of {len(nodes)} nodes are well"] if well < options.keep else []
    to_stderr("\n".join(lines))
    return Shown([",".join(best(nodes, options.keep))], status=int(well < options.keep))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """End with the exit status, whatever still hangs in this process."""
    status = measure(arguments)
    sys.stdout.flush()
    os._exit(status)
