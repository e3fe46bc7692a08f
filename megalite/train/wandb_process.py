"""The process that shows a run at wandb while it goes on: `python -m megalite.train.wandb_process FOLDER MODE PID`.

It reads the run's own files, so training never waits for it, and whatever happens to it happens to it alone. Its input
is the trainer's life: the exit status as a line of JSON, or just an end where the trainer was killed. Lines on its
output are for the user; what wandb itself has to say goes to its log. It imports no torch.
"""

import json
import math
import os
import select
import sys
import threading
from pathlib import Path

from megalite.train.signals import ignore_stop_signals
from megalite.train.wandb_rows import RowReader
from megalite.train.wandb_sender import Sender, sending

POLL_S = 1.0
AFTER_THE_END_S = 300.0  # how long a trainer that has ended may be outlived
REPLAY = "python scripts/wandb_replay.py"


class TrainerEnd:
    """When and how the trainer ended. Watched by a thread: wandb may hold the main one up for as long as it likes."""

    def __init__(self, trainer: int) -> None:
        self.status: int | None = None  # None: it was killed, or has not ended
        self._trainer = trainer
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="trainer's end", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the trainer has ended, or does within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def _watch(self) -> None:
        while os.getppid() == self._trainer:  # a process that the trainer forked may keep our input open
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                line = sys.stdin.readline()
                self.status = json.loads(line)["status"] if line else None
                break
        self._ended.set()
        threading.Event().wait(AFTER_THE_END_S)
        os._exit(1)


def main(arguments: list[str]) -> int:
    folder, mode, trainer = Path(arguments[0]), arguments[1], int(arguments[2])
    ignore_stop_signals()  # meant for the trainer: its end is ours
    os.nice(5)
    user = _user()
    end = TrainerEnd(trainer)
    with sending(folder, patience_s=math.inf) as identity:
        sender = _open(folder, identity, mode, trainer, user)
        rows = RowReader(folder)
        while not end.wait(POLL_S):
            sender.send(rows.complete())
        # Of a killed run the next start repeats the last step, or finishes what belongs to it.
        sender.send(rows.complete() if end.status is None else rows.rest())
        sender.finish(1 if end.status is None else end.status)
    return 0


def _open(folder: Path, identity: str, mode: str, trainer: int, user: int) -> Sender:
    """The run at wandb; on disk where the network, the server or the key does not let it be opened."""
    try:
        sender = Sender(folder, identity, mode, pid=trainer)
    except Exception as error:
        if mode != "online":
            raise
        reason = " ".join(str(error).split())[:200]
        _tell(user, f"cannot be reached ({type(error).__name__}: {reason})")
        _tell(user, f"training goes on; written to {folder / 'wandb'}, to be sent with {REPLAY} {folder}")
        return Sender(folder, identity, "offline", pid=trainer)
    if sender.address:
        _tell(user, sender.address)
    return sender


def _user() -> int:
    """A descriptor of the output for the user's lines. Whatever else is printed from now on goes to the log."""
    user = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return user


def _tell(user: int, text: str) -> None:
    try:
        os.write(user, f"{text}\n".encode())
    except OSError:  # the trainer is gone
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
