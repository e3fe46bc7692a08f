"""Sending finished or interrupted runs to wandb from their folders."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.config.problems import Problem, UserError
from megalite.config.wandb_rules import MODES, wandb_is_installed
from megalite.train.wandb_key import key_is_set_up
from megalite.train.wandb_rows import METRICS, RowReader
from megalite.train.wandb_sender import AlreadySendingError, Sender, sending

PATIENCE_S = 30.0  # with the sender of a run that has just ended: it goes on for seconds where all is well


class ReplayError(Exception):
    """wandb did not take a run; the message says why."""


def checked(folders: Sequence[Path], variables: Mapping[str, str], home: Path | None = None) -> str:
    """The mode in which to send, after a look at everything that would prevent it. Raises UserError."""
    problems = [problem for folder in folders if (problem := _problem(folder))]
    mode = MODES.get(variables.get("WANDB_MODE") or "online", "disabled")
    if mode == "disabled":
        remedy = "WANDB_MODE=online or offline, or leave it out"
        problems.append(Problem("WANDB_MODE", variables["WANDB_MODE"], "nothing would be sent", remedy))
    if not wandb_is_installed():
        problems.append(Problem("wandb", ..., "the package is not installed", "pip install wandb"))
    if mode == "online" and not key_is_set_up(variables, home):
        remedy = "wandb login, or the variable WANDB_API_KEY; WANDB_MODE=offline needs none"
        problems.append(Problem("wandb", ..., "no key is set up", remedy))
    if problems:
        raise UserError(problems)
    return mode


def _problem(folder: Path) -> Problem | None:
    if not folder.is_dir():
        return Problem("RUN_DIR", str(folder), "there is no such folder", "the folder of a run (run_dir)")
    missing = " and no ".join(name for name in ("config.yaml", METRICS) if not (folder / name).is_file())
    if missing:
        return Problem("RUN_DIR", str(folder), f"it holds no {missing}", "the folder of a run (run_dir)")
    if not RowReader(folder).rest():
        return Problem("RUN_DIR", str(folder), f"{METRICS} holds no steps", "a run that has trained")
    if not os.access(folder, os.W_OK):
        return Problem("RUN_DIR", str(folder), "it is not writable: wandb keeps its files there", "a copy of it")
    return None


def replay(folder: Path, mode: str) -> str:
    """Send one run; what came of it, in words. Raises ReplayError, and UserError for a run that another process sends,
    for PATIENCE_S from now."""
    folder = folder.resolve()
    try:
        with sending(folder, patience_s=PATIENCE_S) as identity, contextlib.redirect_stdout(sys.stderr):
            sender = Sender(folder, identity, mode, pid=os.getpid())
            rows = RowReader(folder).rest()
            sender.send(rows)
            sender.finish(0)
    except AlreadySendingError:
        rule, remedy = f"another process is sending it to wandb, {PATIENCE_S:g} s on", "wait for it, or stop the run"
        raise UserError(Problem("RUN_DIR", str(folder), rule, remedy)) from None
    except Exception as error:
        raise ReplayError(f"{folder} was not sent: {type(error).__name__}: {error}") from error
    known = len(rows) - sender.sent
    before = f", {known} were there already" if known else ""
    return f"{sender.sent} steps sent{before}: {sender.address or sender.folder}"
