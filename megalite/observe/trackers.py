"""The trackers of a run: where it is shown beside the run folder, in TensorBoard and at Weights and Biases.

One thread opens them and passes records on, so that a slow or failing tracker never holds training up. It starts with
the first record of metrics: an import or a network does not delay the first step. Records keep the names that they have
in metrics.jsonl.

At wandb all starts of a run are one run, whose steps are those of training. A run that cannot be sent (no network, no
key) is written to the run folder's wandb/, and the user is shown the `wandb sync` command that sends it later. wandb
asks no questions here, and no file that it writes holds the key.
"""

import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from textwrap import indent
from threading import Thread
from typing import Any, Literal

from megalite.config.files import read_object, write_atomically
from megalite.config.machine_rules import asked_mode, is_installed
from megalite.config.schema import Config
from megalite.config.settings import as_plain
from megalite.errors.words import several
from megalite.train.history import ENDS, Note

FINISH_S = 60.0  # that the end of a run waits for its trackers: a busy machine may take so long to import
FAILED_S = 2.0  # in all for a run that fails: the other ranks wait 3 s for what this one has to say
ID_FILE = "wandb.json"  # of the run folder
OF_NETWORK = {  # settings of wandb where it sends, unless the user's own variables say otherwise
    "init_timeout": 10.0,  # seconds for the server to open the run; by default 90
    "finish_timeout": 5.0,  # seconds at the end of a run for what is not sent yet; by default without end
    "finish_timeout_raises": True,
}
ALWAYS = {
    "WANDB_SILENT": "true",  # the notes of this file say what matters
    "WANDB_CONSOLE": "off",  # the run folder has the logs
    "WANDB_DISABLE_GIT": "true",  # the address of a remote may hold a password
    "WANDB_ERROR_REPORTING": "false",
}


Tracker = Any  # add(record), finish(status), and `rescue`: the command that shows what was not done, or nothing
Opener = Callable[[], Tracker | None]


class Trackers:
    """Passes every record on to all trackers of a run: a view (train/history.py). The first failure of a tracker is a
    note to the user."""

    name = "trackers"

    def __init__(self, openers: Mapping[str, Opener], note: Note) -> None:
        self._openers, self._note = dict(openers), note
        self._trackers: dict[str, Tracker] = {}  # that are open
        self._failed: set[str] = set()  # trackers that the user was told of
        self._queue: SimpleQueue[Mapping[str, Any] | int] = SimpleQueue()  # an exit status at the end
        self._thread = Thread(target=self._run, name="trackers", daemon=True)

    def add(self, record: Mapping[str, Any]) -> None:
        if self._openers:
            if self._thread.ident is None and "kind" not in record:
                self._thread.start()
            self._queue.put(record)
        if record.get("kind") in ENDS:
            self.finish(record["status"])

    def close(self) -> None:
        self.finish(1)  # of a run that another job has taken over

    def finish(self, status: int) -> None:
        """Let the trackers finish, and wait for them. The second call does nothing."""
        names, self._openers = ", ".join(self._openers), {}
        if not names or self._thread.ident is None:
            return
        self._queue.put(status)
        self._thread.join(FAILED_S if status else FINISH_S)
        if self._thread.is_alive():
            self._failed |= {*names.split(", ")}  # they say nothing more
            later = "".join(f"; to send the rest: {it.rescue}" for it in self._trackers.values() if it.rescue)
            waiting = f"{several(self._queue.qsize(), 'record')} wait; the run folder holds all"
            self._note(f"{names}: not done at the end of the run, {waiting}{later}")

    def _run(self) -> None:
        for name, opener in [*self._openers.items()]:
            if (tracker := self._attempt(name, opener)) is not None:
                self._trackers[name] = tracker
        while not isinstance(record := self._queue.get(), int):
            for name, tracker in self._trackers.items():
                self._attempt(name, tracker.add, record)
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.finish, record)

    def _attempt(self, name: str, action: Callable[..., Any], *values: Any) -> Any:
        try:
            return action(*values)
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._note(f"{name}: warning: {reason}; the run itself is not affected")
            return None


class TensorBoardTracker:
    """Event files in the run folder's tensorboard/ (log.tensorboard): every number as a scalar, samples as text."""

    rescue = ""  # what is on disk is shown

    def __init__(self, folder: Path, step: int) -> None:
        """The run continues after `step`: what an earlier start wrote of later steps is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=10)

    def add(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") == "sample":
            as_code = indent(record["prompt"] + record["text"], "    ", lambda text: True)  # Markdown would change it
            self._writer.add_text(f"samples/{' '.join(record['prompt'].split())[:60]}", as_code, record["step"])
        for name, value in flat_values(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def finish(self, status: int) -> None:
        self._writer.close()


class WandbTracker:
    """An open run at wandb."""

    def __init__(self, run: Any, note: Note) -> None:
        self._run, self._note = run, note
        self._samples: list[list[Any]] = []  # rows of the table of the newest step
        online = [] if run.offline else ["--include-online"]
        self.rescue = shlex.join(["wandb", "sync", *online, str(Path(run.dir).parent)])
        note(f"offline; to send it later: {self.rescue}" if run.offline else str(run.url))

    def add(self, record: Mapping[str, Any]) -> None:
        from wandb import Table

        values = flat_values(record)
        if record.get("kind") == "sample":
            row = [record["step"], record["prompt"], record["text"]]
            self._samples = [*(it for it in self._samples if it[0] == record["step"]), row]
            values["samples"] = Table(columns=["step", "prompt", "text"], data=self._samples)
        if values:
            self._run.log(values, step=record["step"])

    def finish(self, status: int) -> None:
        try:
            self._run.finish(exit_code=status)
        except TimeoutError:
            self._note(f"not everything is sent; to send the rest: {self.rescue}")


def flat_values(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The known numbers of a record of metrics by name, but the step. Nested ones get names like `time_split/forward`,
    which trackers show as groups."""
    flat: dict[str, Any] = {}
    for name, value in record.items() if "kind" not in record else ():
        if isinstance(value, Mapping):
            flat |= flat_values(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            flat[f"{prefix}{name}"] = value
    return flat


def open_trackers(config: Config, folder: Path, step: int, note: Note) -> Trackers:
    """The trackers that `config` and this machine's variables ask for, for rank 0. The run continues after `step`."""
    openers, mode = dict[str, Opener](), asked_mode(config.log.wandb, os.environ)
    if config.log.tensorboard:
        openers["tensorboard"] = lambda: TensorBoardTracker(folder, step)
    netrc = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")  # wandb may find a key there
    has_key = bool(os.environ.get("WANDB_API_KEY")) or os.path.exists(netrc)
    if mode is None and not (has_key and is_installed("wandb")):
        rule = "that takes a key (wandb login) and the package (pip install wandb); or log.wandb=offline"
        note(f"wandb: disabled: {rule}")
    elif mode != "disabled":
        openers["wandb"] = partial(_open_wandb, config, folder, mode, lambda text: note(f"wandb: {text}"))
    return Trackers(openers, note)


def _open_wandb(config: Config, folder: Path, mode: str | None, note: Note) -> WandbTracker | None:
    """The run at wandb, or on disk where it cannot be sent now. `mode` None: only if a key is set up."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]  # wandb takes empty variables for values
    folders = {"WANDB_DATA_DIR": str(folder / "wandb"), "WANDB_CACHE_DIR": str(folder / "wandb" / "cache")}
    os.environ.update({**ALWAYS, **folders, **os.environ})
    import wandb

    def start(mode: Literal["online", "offline"], **settings: Any) -> WandbTracker:
        return WandbTracker(
            wandb.init(
                id=_id_of_run(folder),
                resume="allow",
                mode=mode,
                dir=folder,
                project=config.log.wandb_project,
                entity=config.log.wandb_entity,
                name=config.log.wandb_name or os.environ.get("WANDB_NAME") or config.run_name,
                config=as_plain(config),
                settings=wandb.Settings(**settings),
            ),
            note,
        )

    if mode != "offline":
        try:
            wandb.setup(wandb.Settings(mode="online"))
            if wandb.login(prompt=False, verify=False):
                asked = {name: value for name, value in OF_NETWORK.items() if f"WANDB_{name.upper()}" not in os.environ}
                return start("online", **asked)
            note("no key is set up (wandb login)")
            if mode is None:
                return None
        except Exception as error:
            note(f"cannot be sent now ({' '.join(str(error).split())[:200]})")
        wandb.teardown()
    return start("offline")


def _id_of_run(folder: Path) -> str:
    """The run's id at wandb, the same for all starts."""
    path = folder / ID_FILE
    if not path.exists():
        write_atomically(path, (json.dumps({"id": secrets.token_hex(8)}) + "\n").encode())
    return str(read_object(path, "delete it; the run is a new one at wandb then")["id"])
