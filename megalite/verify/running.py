"""Trains twice, as users do: on the ranks of a layout, and on one process. Both run folders lie in one place.

The processes are forks of one server that has imported torch and has run nothing (a process that ran threaded
operations must not fork). Nobody waits for ever: a process that fails, dies or hangs is a `RunFailure` that says which.
"""

import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np

from megalite.config.schema import Config
from megalite.errors.problems import REFUSED, UserError
from megalite.launch.environment import LOOPBACK, ProcessEnvironment

ECHO_S = 2.0  # how long the stack of a process that hangs may take to be written
LAST_WORDS = 40  # lines of a process that failed
DOCUMENT = 6  # tokens on average: several documents in each sample
LETTERS = 0x4E00  # some twenty thousand in a row
LAYOUT, SINGLE = "layout", "single"  # the run folders

TrainRank = Callable[[Config, ProcessEnvironment], int]  # what a process runs; its exit status


class RunFailure(Exception):  # noqa: N818 - it is what happened, told to the user
    """A process failed, died or hung. `status` is the exit status: that of a refusal where it was one."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def train_both(
    config: Config, ranks: int, reference: Config, folder: Path, timeout_s: float, trains: tuple[TrainRank, TrainRank]
) -> None:
    """Train in `folder` as `config` says on so many ranks, and as `reference` says on one process.

    `trains`: what a rank of the layout runs, and what the one process runs; functions at the top of a module.
    """
    _write_text(folder / "text.jsonl", config)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    modules = ["torch", trains[1].__module__, "megalite.train.run", "megalite.prepare.prepare"]
    multiprocessing.set_forkserver_preload(modules)
    context, processes = multiprocessing.get_context("forkserver"), list[ForkServerProcess]()
    places = [ProcessEnvironment(rank, ranks, rank, ranks, LOOPBACK, port, "env") for rank in range(ranks)]
    jobs = [(f"rank {place.rank}", trains[0], _placed(config, folder, LAYOUT), place) for place in places]
    jobs.append(("the single process", trains[1], _placed(reference, folder, SINGLE), ProcessEnvironment()))
    try:
        for name, *job in jobs:
            process = context.Process(target=_run, args=(*job, folder / name, timeout_s), name=name, daemon=True)
            process.start()
            processes.append(process)
        _wait_for(processes, folder, time.monotonic() + timeout_s + ECHO_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _placed(config: Config, folder: Path, run: str) -> Config:
    """The settings with a run folder and the text in `folder`."""
    text, cache = str(folder / "text.jsonl"), str(folder / "cache")
    data = replace(config.data, source="text", workers=1, path=text, cache_dir=cache)
    return replace(config, run_dir=str(folder / run), tokenizer=str(folder / "tokenizer"), data=data)


def _write_text(path: Path, config: Config) -> None:
    """Documents of random letters, never the same twice, and beside them the tokenizer: as many letters as the
    vocabulary has room for, and an end of document."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    from megalite.data.tokenizers import END, TextTokenizer

    train, dice = config.train, np.random.default_rng(config.seed)
    letters = [chr(LETTERS + at) for at in range(min((config.model.vocab_size or 2) - 1, 20_000))]
    needed = 2 * (train.steps + 1) * train.global_batch_size * train.seq_length  # a share is kept for validation
    with path.open("w", encoding="utf-8") as file:
        for length in dice.geometric(1 / DOCUMENT, size=-(-needed // DOCUMENT)):
            file.write(f'{{"text": "{"".join(letters[at] for at in dice.integers(len(letters), size=length))}"}}\n')
    backend = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate([*letters, END])}, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.add_special_tokens([END])
    TextTokenizer(backend, {"eos_token": END}).save(path.with_name("tokenizer"))


def _wait_for(processes: Sequence[ForkServerProcess], folder: Path, deadline: float) -> None:
    """Return when all have ended well; RunFailure once one has not: the others then fail because of it."""
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
        ended = [waiting.pop(sentinel) for sentinel in [*waiting] if sentinel in ready]
        for process in ended:
            process.join()
        if failed := [process for process in ended if process.exitcode]:
            refused = [process for process in failed if process.exitcode == REFUSED][:1]  # all ranks say the same
            words = [_end_of(process, folder) for process in refused or failed]
            raise RunFailure("\n".join(words), REFUSED if refused else 1)
        if not ended:
            raise RunFailure("\n".join(_end_of(process, folder) for process in waiting.values()))


def _end_of(process: ForkServerProcess, folder: Path) -> str:
    """How a process has ended, or that it has not, with the last lines that it printed."""
    output, code = folder / process.name, process.exitcode
    lines = output.read_text(errors="replace").splitlines()[-LAST_WORDS:] if output.exists() else []
    if code is None:
        how = "did not answer in time: a collective that not all ranks join, or slow. It stood at"
    else:
        how = f"died by {signal.Signals(-code).name} (SIGKILL: out of memory?)" if code < 0 else "failed:"
    return "\n".join([*([] if code == REFUSED else [f"{process.name} {how}"]), *lines])


def _run(train: TrainRank, config: Config, place: ProcessEnvironment, output: Path, timeout_s: float) -> None:
    """One process: train, and write what it says to `output`; or, when the time is up, where it stands."""
    import torch  # the server has

    os.environ["OMP_NUM_THREADS"] = "1"  # so that the trainer leaves the number of threads alone
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
