"""A run folder as a run at wandb.

The run at wandb has one id for all starts and replays, kept in wandb.json, whose lock says who is sending. Every sender
goes through the whole history of the run folder and leaves out the steps that wandb knows: what one of them could not
send the next one does, nothing is sent twice, and without a network the newest folder under wandb/ holds all of it.

wandb is imported here and nowhere else, in functions: a process that sends nothing never loads it.
"""

import fcntl
import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from megalite.train.wandb_rows import Row

ID_FILE = "wandb.json"
POLL_S = 0.2
INIT_TIMEOUT_S = "30"  # unless WANDB_INIT_TIMEOUT says otherwise; wandb's own is 90


class AlreadySendingError(Exception):
    """Another process sends this run to wandb."""


@contextmanager
def sending(folder: Path, *, patience_s: float) -> Iterator[str]:
    """Be the only sender of this run; gives its id at wandb. Waits so long for another one to end, then
    AlreadySendingError."""
    end = time.monotonic() + patience_s
    descriptor = os.open(folder / ID_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while not _locked(descriptor):
            if time.monotonic() >= end:
                raise AlreadySendingError(str(folder))
            time.sleep(POLL_S)
        yield _id(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _id(descriptor: int) -> str:
    try:
        return str(json.loads(os.pread(descriptor, 1 << 16, 0))["id"])
    except (ValueError, KeyError, TypeError):
        identity = secrets.token_hex(8)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"id": identity}).encode() + b"\n", 0)
        os.fsync(descriptor)
        return identity


class Sender:
    """An open run at wandb."""

    def __init__(self, folder: Path, identity: str, mode: str, *, pid: int) -> None:
        """`mode`: online or offline; `pid`: the process whose use of the machine is shown. Raises what wandb raises."""
        config = yaml.safe_load((folder / "config.yaml").read_text())
        log = config["log"]
        _keep_inside(folder)
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT") or INIT_TIMEOUT_S),
            x_stats_pid=pid,
            x_save_requirements=False,
            disable_git=True,
        )
        try:
            self._run = wandb.init(
                dir=str(folder),
                id=identity,
                resume="allow",
                mode="online" if mode == "online" else "offline",
                project=log["wandb_project"],
                entity=log["wandb_entity"],
                name=log["wandb_name"] or os.environ.get("WANDB_NAME") or folder.name,
                config=config,
                save_code=False,
                settings=settings,
            )
        except BaseException:
            wandb.teardown()  # its service would go on holding the id
            raise
        self._table = wandb.Table
        self.sent = 0  # rows

    @property
    def address(self) -> str | None:
        """Where the run is to be seen; None offline."""
        return None if self._run.offline else self._run.url

    @property
    def folder(self) -> str:
        """The files that wandb keeps of it on this machine."""
        return str(Path(self._run.dir).parent)

    def send(self, rows: Iterable[Row]) -> None:
        """Hand over rows, in the order of their steps; those that wandb knows from an earlier sender are left out."""
        for row in rows:
            if row.step >= self._run.starting_step:
                self._send(row)
                self.sent += 1

    def _send(self, row: Row) -> None:
        """One row. For a table wandb asks its server at once, which may fail: the figures are worth more."""
        if row.samples:
            texts = [[row.step, prompt, text] for prompt, text in row.samples.items()]
            try:
                table = self._table(columns=["step", "prompt", "text"], data=texts)
                self._run.log({**row.values, "samples": table}, step=row.step)
                return
            except Exception as error:
                print(f"the samples of step {row.step} are not sent: {error}", file=sys.stderr, flush=True)
        self._run.log(row.values, step=row.step)

    def finish(self, status: int) -> None:
        """The run has ended with this exit status; returns when wandb has everything."""
        self._run.finish(exit_code=status)


def _keep_inside(folder: Path) -> None:
    """wandb's own files belong into the run folder, and what goes wrong in it is nobody else's business."""
    inside = folder / "wandb"
    os.environ.pop("WANDB_SERVICE", None)  # another program's
    os.environ.setdefault("WANDB_DATA_DIR", str(inside))
    os.environ.setdefault("WANDB_CACHE_DIR", str(inside / "cache"))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
