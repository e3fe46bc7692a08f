"""One log file per rank in the run folder, for what a terminal cannot keep: who ran where, and what went wrong."""

import faulthandler
import logging
import os
import platform
import socket
from pathlib import Path

import torch

from megalite.parallel.context import ParallelContext


def open_log(run_dir: Path, context: ParallelContext) -> logging.Logger:
    """This rank's logger, appending to `logs/rank-NNNNN.log`; a crashing interpreter leaves its stacks there too."""
    path = run_dir / "logs" / f"rank-{context.rank:05d}.log"
    path.parent.mkdir(exist_ok=True)
    log = logging.Logger(f"megalite.rank{context.rank}")
    handler = logging.FileHandler(path)
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
