"""One log file per rank in the run folder, for what a terminal cannot keep: who ran where, and what went wrong."""

import faulthandler
import logging
import os
import platform
import socket
from pathlib import Path
from typing import TextIO

import torch

from megalite.checkpoint.commit import open_to_append
from megalite.errors.problems import Problem, UserError, printable
from megalite.launch.context import ParallelContext


class LogLine(logging.Formatter):
    """When, how grave, what; nothing that would drive the terminal of who reads it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class LogFile(logging.FileHandler):
    """A full disk costs lines of the log, nothing else."""

    def _open(self) -> TextIO:  # type: ignore[override]
        return open_to_append(Path(self.baseFilename))

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
    handler.setFormatter(LogLine())
    log.addHandler(handler)
    assert handler.stream is not None, "the file is open from the start"
    faulthandler.enable(handler.stream)
    log.info(
        "rank %d of %d on %s, process %d, device %s, %s, torch %s, Python %s, torch's threads: %d",
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
