"""One log file per rank in the run folder, for what a terminal cannot keep: who ran where, and what went wrong."""

import errno
import faulthandler
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megalite.config.durable_files import open_to_append
from megalite.errors.problems import Problem, UserError, printable
from megalite.launch.context import ParallelContext
from megalite.train.history import IN_THE_WAY


class LogFile(logging.StreamHandler):
    """Nothing that would drive the terminal of who reads it. A full disk costs lines of the log, nothing else."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Instead of logging's own, which prints a traceback for every line."""


def open_log(run_dir: Path, context: ParallelContext) -> logging.Logger:
    """This rank's logger, appending to `logs/rank-NNNNN.log`; a crashing interpreter leaves its stacks there too."""
    path = run_dir / "logs" / f"rank-{context.rank:05d}.log"
    log = logging.Logger(f"megalite.rank{context.rank}")
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        file = open_to_append(path)
    handler = LogFile(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    faulthandler.enable(file)
    place = f"rank {context.rank} of {context.world_size} on {socket.gethostname()}, process {os.getpid()}"
    log.info("%s, %s, %s, torch's threads: %d", place, context.device, context.dtype, torch.get_num_threads())
    return log


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the OSError of a file that cannot be written into a UserError that names it."""
    try:
        yield
    except OSError as error:
        why = "it is a link" if path.is_symlink() else error.strerror
        remedy = "make room on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else IN_THE_WAY
        raise UserError(Problem("run_dir", str(path), f"cannot be written: {why}", remedy)) from error
