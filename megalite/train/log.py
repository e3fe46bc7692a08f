"""One log file per rank in the run folder, for what a terminal cannot keep: who ran where, and what went wrong."""

import faulthandler
import logging
import os
import platform
import socket
from pathlib import Path

import torch

from megalite.config.problems import Problem, UserError
from megalite.parallel.context import ParallelContext


class LogFile(logging.FileHandler):
    """A full disk costs lines of the log, nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Instead of logging's own, which prints a traceback for every line."""


def open_log(run_dir: Path, context: ParallelContext) -> logging.Logger:
    """This rank's logger, appending to `logs/rank-NNNNN.log`; a crashing interpreter leaves its stacks there too."""
    path = run_dir / "logs" / f"rank-{context.rank:05d}.log"
    log = logging.Logger(f"megalite.rank{context.rank}")
    try:
        path.parent.mkdir(exist_ok=True)
        handler = LogFile(path)
    except OSError as error:
        rule = f"the log {path} cannot be written: {error.strerror}"
        raise UserError(Problem("run_dir", str(run_dir), rule, "move it away, or set another run_dir")) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    assert handler.stream is not None, "the file is open from the start"
    faulthandler.enable(handler.stream)
    log.info(
        "rank %d of %d on %s pid %d device %s dtype %s torch %s python %s threads %d",
        context.rank,
        context.world_size,
        socket.gethostname(),
        os.getpid(),
        context.device,
        context.dtype,
        torch.__version__,
        platform.python_version(),
        torch.get_num_threads(),
    )
    return log
