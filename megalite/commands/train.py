"""Trains a GPT: what pretrain_gpt.py and `megalite train` do, on each rank.

Exit status: 0 finished or stopped after saving, 2 refused (said by rank 0), 128 and its number for a signal before the
first step (130: Ctrl-C), else a failure.
"""

import gc
import os
import sys
import time

from megalite.config.schema import Config
from megalite.errors.problems import REFUSED, Problem, UserError, collect, refuse, to_stderr
from megalite.launch.environment import claimed_rank, read_environment, ready_files, set_variables
from megalite.launch.process import (
    INTERRUPTED,
    ProcessEnvironment,
    StopSignals,
    die_with_launcher,
    ignore_stop_signals,
)

WAIT_FOR_RANK_ZERO_S = 5.0  # torchrun ends all ranks when the first one exits: rank 0 must have printed by then


def main(argv: list[str]) -> int:
    """Train, sweep, or show what was asked for: the exit status."""
    from megalite.config.arguments import read_arguments, shown
    from megalite.config.compose import show_information
    from megalite.config.files import refusing

    rank = claimed_rank(os.environ)
    try:
        with refusing("working directory", "cd to a folder that exists"):
            os.getcwd()
        arguments = read_arguments(argv)
        if shown(arguments):
            return show_information(arguments) if rank == 0 else 0
        if arguments.multirun:
            from megalite.commands.sweep import sweep

            return sweep(arguments)
        config, environment = check(argv)
        from torch.distributed.elastic.multiprocessing.errors import record  # torch: from here on it takes seconds

        problems: list[Problem] = []  # past `record`, which would report a refusal as a failure
        status = record(lambda: collect(lambda: train_rank(config, environment), problems))()
        refuse(problems)
        return status or 0
    except UserError as error:
        if rank > 0:
            time.sleep(WAIT_FOR_RANK_ZERO_S)
        # Torchrun has not ended this rank: rank 0 may be well, or missing. Then each machine says once what it lacks.
        first = claimed_rank(os.environ, "LOCAL_RANK") == 0  # of the machine's ranks, or not known
        if rank == 0 or any(it.alone or (it.here and first) for it in error.problems):
            to_stderr(str(error))
        return REFUSED


def check(argv: list[str]) -> tuple[Config, ProcessEnvironment]:
    """Check everything that can be known without torch, and get this process ready for it. UserError where something is
    refused."""
    from megalite.config.compose import load_config
    from megalite.optim.groups import problems_of_groups
    from megalite.plan.memory import fits_this_machine

    problems: list[Problem] = []
    environment = collect(lambda: read_environment(os.environ), problems)
    config = collect(lambda: load_config(argv, environment.world_size if environment else 1), problems)
    if environment is not None and config is not None:
        problems += fits_this_machine(config, environment.world_size, environment.local_world_size)
        problems += problems_of_groups(config)
        if environment.rank == 0 and (port := config.log.metrics_port):
            from megalite.observe.prometheus import Server

            collect(lambda: Server(port).server_close(), problems)
    if environment is None or config is None or problems:
        raise UserError(problems)
    die_with_launcher(environment.launcher)  # during the imports, too: ranks without it wait for nobody
    if (said := set_variables(os.environ)) and environment.rank == 0:
        to_stderr(f"megalite: {said}")
    return config, environment


def train_rank(config: Config, environment: ProcessEnvironment) -> int:
    """Train as `config` says, on this rank: the exit status. Packages that training does not import meet it here."""
    from megalite.hf.saved_model import import_model
    from megalite.launch.preflight import preflight, table
    from megalite.observe.about import open_views, start_fields
    from megalite.observe.alerts import send_stall
    from megalite.observe.terminal import Terminal
    from megalite.plan.gpu_memory import fit_micro_batch
    from megalite.plan.horizon import with_steps
    from megalite.prepare.prepare import examine, prepare
    from megalite.train.run import Companions, run

    terminal = Terminal(sys.stdout, enabled=environment.rank == 0)
    companions = Companions(
        examine=examine,
        prepare=lambda config: prepare(config, terminal.preparing),
        read_weights=import_model,
        fit=fit_micro_batch,
        with_steps=with_steps,
        look_at_nodes=lambda context, folder: table(preflight(context, folder)),
        say=terminal.print,
        alert=lambda job, message: send_stall(job.config, job.begun_step, message),
        open_views=lambda job, note: open_views(job, terminal, note),
        about=start_fields,
    )
    return run(config, environment, companions)


def main_to_the_end(argv: list[str]) -> int:
    """The same as a whole process, which no signal disturbs once it has saved."""
    ready_files()
    try:
        with StopSignals(speaks=claimed_rank(os.environ) == 0):
            status = main(argv)
    except (KeyboardInterrupt, SystemExit) as end:
        status = end.code if isinstance(end, SystemExit) and isinstance(end.code, int) else INTERRUPTED
    ignore_stop_signals()
    gc.freeze()  # a last search for garbage among torch's objects would take half a second
    return status
