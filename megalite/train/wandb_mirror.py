"""A run's mirror at wandb, as the trainer sees it: a process of its own that reads what the run writes to its folder.

Training never waits for it: while the run goes on the trainer only starts that process, listens to it without blocking,
and at the end gives it FINISH_S to come to an end of its own before leaving it behind. metrics.jsonl and events.jsonl
stay what counts: whatever wandb did not get, scripts/wandb_replay.py sends later.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import megalite
from megalite.config.schema import Config
from megalite.config.wandb_rules import asked_mode, wandb_is_installed
from megalite.train.wandb_key import key_is_set_up

FINISH_S = 5.0  # that the end of a run may be held up
REPLAY = "python scripts/wandb_replay.py"
LOG = "logs/wandb.log"  # of the run folder


class WandbMirror:
    """Shows one run at wandb. Called by one rank after it has written to the run's files; raises nothing."""

    def __init__(self, folder: Path, mode: str, tell: Callable[[str], None]) -> None:
        """`mode`: online or offline; `tell` gets lines for the user, in the calls of the methods below."""
        self._folder, self._mode, self._tell = folder, mode, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False  # it could not be started, or has ended and that was told

    def record(self, record: Mapping[str, Any]) -> None:
        """metrics.jsonl holds one more line. The first one starts the process: by then the file is this start's."""
        self._attend()

    def sample(self, step: int, prompt: str, text: str) -> None:
        """events.jsonl holds one more sample."""
        self._attend()

    def finish(self, status: int) -> None:
        """The run ends with this exit status and has written its last line."""
        process, self._process = self._process, None
        if process is None or self._over:
            return
        self._over = True
        assert process.stdin is not None
        with suppress(OSError):  # it has ended already
            process.stdin.write(json.dumps({"status": status}).encode() + b"\n")
        with suppress(OSError):
            process.stdin.close()
        if status != 0:  # the other ranks wait for this one's words
            return
        try:
            ended = process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            ended = None
        for line in _heard(process):
            self._say(line)
        if ended is None:
            self._say(f"not everything is sent yet; that goes on without this process ({self._folder / LOG})")
            self._say(f"what is missing later: {REPLAY} {self._folder}")
        elif ended:
            self._say_failed(ended)

    def _attend(self) -> None:
        """Start the process, or pass on what it says."""
        if self._over:
            return
        try:
            if self._process is None:
                self._process = self._started()
                return
            for line in _heard(self._process):
                self._say(line)
            if (ended := self._process.poll()) is not None:
                self._over = True
                self._say_failed(ended)
        except OSError as error:
            self._over = True
            self._say(f"not started: {error}; {REPLAY} {self._folder} sends the run later")

    def _started(self) -> "subprocess.Popen[bytes]":
        package = str(Path(megalite.__file__).parent.parent)
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        module = f"{__package__}.wandb_process"
        log = self._folder / LOG
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(self._folder), self._mode, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # neither a terminal's Ctrl-C nor a launcher that kills its ranks means it
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _say_failed(self, status: int) -> None:
        self._say(f"its process ended with status {status} ({self._folder / LOG}); the run is not affected")
        self._say(f"what is missing: {REPLAY} {self._folder}")

    def _say(self, text: str) -> None:
        self._tell(f"wandb: {text}")


def _heard(process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """The lines that the process has said since the last time. They are short, so each comes in one piece."""
    assert process.stdout is not None
    with suppress(BlockingIOError):
        while said := os.read(process.stdout.fileno(), 1 << 16):
            yield from said.decode(errors="replace").splitlines()


def open_mirror(config: Config, folder: Path, tell: Callable[[str], None]) -> WandbMirror | None:
    """The mirror that `config` and this machine's variables ask for, or None. For one rank of a job, once it has the
    run folder to itself."""
    mode, note = chosen_mode(config.log.wandb, os.environ)
    if note:
        tell(f"wandb: {note.format(folder=folder)}")
    return None if mode == "disabled" else WandbMirror(folder, mode, tell)


def chosen_mode(setting: str | None, variables: Mapping[str, str], home: Path | None = None) -> tuple[str, str | None]:
    """disabled, offline or online; and what to tell the user about it, of the run in `{folder}`."""
    asked = asked_mode(setting, variables)
    if asked == "disabled":
        return "disabled", None
    if asked == "offline":
        return "offline", f"offline; to send it later: {REPLAY} {{folder}}"
    key = key_is_set_up(variables, home)
    if asked == "online":
        if key:
            return "online", None
        return "offline", f"no key is set up (wandb login), so offline; to send it later: {REPLAY} {{folder}}"
    if not key:
        return "disabled", "disabled, no key is set up (wandb login, or log.wandb=offline)"
    if not wandb_is_installed():
        return "disabled", "disabled, a key is set up but the package is not installed (pip install wandb)"
    return "online", None
