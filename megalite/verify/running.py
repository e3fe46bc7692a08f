"""Trains twice, as users do: on the ranks of a layout, and on one process. Both run folders lie in one place.

The processes are forks of one server that has imported torch and has run nothing (a process that ran threaded
operations must not fork). Nobody waits for ever: a process that fails, dies or hangs is a `RunFailure` that says which.
"""

import faulthandler
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import torch

from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.data.token_file import with_suffix
from megalite.data.tokenizers import END, TextTokenizer
from megalite.errors.problems import REFUSED, UserError
from megalite.launch.process import LOOPBACK, ProcessEnvironment
from megalite.prepare.prepare import char_tokenizer
from megalite.prepare.tokenizing import write_index

ECHO_S = 2.0  # how long the stack of a process that hangs may take to be written
LAST_WORDS = 40  # lines of a process that failed
DOCUMENT = 6  # tokens on average: several documents in each sample
LAYOUT, SINGLE = "layout", "single"  # the run folders

TrainRank = Callable[[Config, ProcessEnvironment], int]  # what a process runs; its exit status


class RunFailure(Exception):  # noqa: N818 - it is what happened, told to the user
    """A process failed, died or hung: what to tell the user, and the exit status."""


def train_both(config: Config, ranks: int, reference: Config, folder: Path, timeout_s: float, train: TrainRank) -> None:
    """Train in `folder` as `config` says on so many ranks, and as `reference` says on one process. `train` is what each
    process runs, a function at the top of a module."""
    _write_tokens(folder / "tokens", config)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload([__name__, train.__module__, "megalite.train.run"])
    context, processes = multiprocessing.get_context("forkserver"), list[ForkServerProcess]()
    places = [ProcessEnvironment(rank, ranks, rank, ranks, LOOPBACK, port, "env") for rank in range(ranks)]
    jobs = [(f"rank {place.rank}", config, LAYOUT, place) for place in places]
    jobs += [("the single process", reference, SINGLE, ProcessEnvironment())]
    data = {"data.source": "tokens", "data.path": str(folder / "tokens")}
    try:
        for name, settings, run, place in jobs:
            job = train, with_values(settings, {**data, "run_dir": str(folder / run)}), place, folder / name, timeout_s
            processes.append(context.Process(target=_run, args=job, name=name, daemon=True))
            processes[-1].start()
        _wait_for(processes, folder, time.monotonic() + timeout_s + ECHO_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _write_tokens(prefix: Path, config: Config) -> None:
    """A token file of random documents, never the same twice, and its tokenizer, which knows what ends a document."""
    train, dice, backend = config.train, np.random.default_rng(config.seed), char_tokenizer("a").backend
    backend.add_special_tokens([END])
    TextTokenizer(backend, {"eos_token": END}).save(with_suffix(prefix, ".tokenizer"))
    needed = 2 * (train.steps + 1) * train.global_batch_size * train.seq_length  # a share is kept for validation
    lengths = 1 + dice.geometric(1 / (DOCUMENT - 1), size=-(-needed // DOCUMENT))
    tokens = dice.integers(config.model.vocab_size or 2, size=lengths.sum(), dtype=np.int32)
    tokens[lengths.cumsum() - 1] = backend.token_to_id(END)
    tokens.tofile(with_suffix(prefix, ".bin"))
    write_index(prefix, tokens.dtype, lengths, {})


def _wait_for(processes: Sequence[ForkServerProcess], folder: Path, deadline: float) -> None:
    """Return when all have ended well; RunFailure once one has not: the others then fail because of it."""
    running = [*processes]
    while running and wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
        running = [process for process in running if process.exitcode is None]
        failed = [process for process in processes if process.exitcode]
        refused = [process for process in failed if process.exitcode == REFUSED][:1]  # all ranks say the same
        if failed:
            ends = [_end_of(process, folder) for process in refused or failed]
            raise RunFailure("\n".join(ends), REFUSED if refused else 1)
    if running:
        raise RunFailure("\n".join(_end_of(process, folder) for process in running), 1)


def _end_of(process: ForkServerProcess, folder: Path) -> str:
    """How a process has ended, or that it has not, with the last lines that it printed."""
    output, code = folder / process.name, process.exitcode
    lines = output.read_text(errors="replace").splitlines()[-LAST_WORDS:] if output.exists() else []
    how = f"failed, exit status {code} (-9: killed, out of memory?):"
    if code is None:
        how = "did not answer in time: a collective that not all ranks join, or slow. It stood at"
    return "\n".join([*([] if code == REFUSED else [f"FAIL: {process.name} {how}"]), *lines])


def _run(train: TrainRank, config: Config, place: ProcessEnvironment, output: Path, timeout_s: float) -> None:
    """One process: train, and write what it says to `output`; or, when the time is up, where it stands."""
    torch.set_num_threads(1)  # more would spin in each other's way
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        faulthandler.dump_traceback_later(timeout_s, file=file)
        status = 1
        try:
            status = train(config, place)
        except UserError as error:
            file.write(str(error))
            status = REFUSED
        except Exception:
            traceback.print_exc(file=file)
        faulthandler.cancel_dump_traceback_later()
    os._exit(status)
