"""The trackers of a run: where it is shown beside the run folder, in TensorBoard, trackio and Weights and Biases.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from queue import SimpleQueue
from textwrap import indent
from threading import Thread
from typing import Any

from megalite.config.files import read_object, write_atomically
from megalite.config.machine_rules import asked_mode, is_installed
from megalite.config.schema import Config
from megalite.config.settings import as_plain, with_values
from megalite.errors.problems import several
from megalite.observe.run_data import flat_values
from megalite.train.history import ENDS, Note, Record, View

FINISH_S = 60.0  # that the end of a run waits for its trackers: a busy machine may take so long to import
FAILED_S = 2.0  # in all for a run that fails: the other ranks wait 3 s for what this one has to say
ID_FILE = "wandb.json"  # of the run folder
Tracker = tuple[View, str]  # what shows records, and the command that sends what it did not; "": there is none
VARIABLES = {  # of wandb, unless the user has set them
    "WANDB_SILENT": "true",  # the notes of this file say what matters
    "WANDB_CONSOLE": "off",  # the run folder has the logs
    "WANDB_DISABLE_GIT": "true",  # the address of a remote may hold a password
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_INIT_TIMEOUT": "10",  # seconds for the server to open the run; by default 90
    "WANDB_FINISH_TIMEOUT": "5",  # seconds at the end of a run for what is not sent yet; by default without end
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
}


class Trackers:
    """Passes every record on to all trackers of a run: `add` is a view (train/history.py). The first failure of a
    tracker is a note to the user. With `wanted` only records that it wants; the first opens the trackers at once."""

    def __init__(
        self,
        openers: Mapping[str, Callable[[], Tracker | None]],
        note: Note,
        wanted: Callable[[Record], bool] | None = None,
    ) -> None:
        self._openers, self._note, self._wanted = openers, note, wanted
        self._open: dict[str, Tracker] = {}
        self._failed: set[str] = set()  # trackers that the user was told of
        self._queue: SimpleQueue[Record] = SimpleQueue()
        self._thread = Thread(target=self._run, name="trackers", daemon=True)

    def add(self, record: Record) -> None:
        """Pass a record on. At the end of the run, wait for the trackers to finish."""
        if not self._openers or not (self._wanted is None or self._wanted(record)):
            return
        if self._thread.ident is None and (self._wanted or "kind" not in record):
            self._thread.start()
        self._queue.put(record)
        if record.get("kind") in ENDS and self._thread.ident is not None:
            self._thread.join(FAILED_S if record["status"] else FINISH_S)
            if self._thread.is_alive():
                self._failed |= self._openers.keys()  # they say nothing more
                later = "".join(f"; to send the rest: {rescue}" for _, rescue in self._open.values() if rescue)
                waiting = f"{several(self._queue.qsize(), 'record')} wait; the run folder holds all"
                self._note(f"{', '.join(self._openers)}: not done at the end of the run, {waiting}{later}")

    def _run(self) -> None:
        for name, opener in self._openers.items():
            with self._noting_failure(name):
                if (tracker := opener()) is not None:
                    self._open[name] = tracker
        ended = False
        while not ended:
            record = self._queue.get()
            for name, (show, _) in self._open.items():
                with self._noting_failure(name):
                    show(record)
            ended = record.get("kind") in ENDS

    @contextmanager
    def _noting_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._note(f"{name}: warning: {reason}; the run itself is not affected")


def open_trackers(config: Config, folder: Path, step: int, note: Note) -> Trackers:
    """The trackers that `config` and this machine's variables ask for, for rank 0. The run continues after `step`."""
    openers, mode = dict[str, Callable[[], Tracker | None]](), asked_mode(config.log.wandb, os.environ)
    if config.log.tensorboard:
        openers["tensorboard"] = partial(open_tensorboard, folder, step)
    if config.log.trackio:
        openers["trackio"] = partial(open_trackio, config)
    netrc = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")  # wandb may find a key there
    has_key = bool(os.environ.get("WANDB_API_KEY")) or os.path.exists(netrc)
    if mode is None and not (has_key and is_installed("wandb")):
        note("wandb: disabled: it takes a key (wandb login) and the package (pip install wandb); or log.wandb=offline")
    elif mode != "disabled":
        openers["wandb"] = partial(open_wandb, config, folder, mode, lambda text: note(f"wandb: {text}"))
    return Trackers(openers, note)


def open_tensorboard(folder: Path, step: int) -> Tracker:
    """Event files in the run folder's tensorboard/ (log.tensorboard): every number as a scalar, samples as text. The
    run continues after `step`: what an earlier start wrote of later steps is not shown any more."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=10)

    def show(record: Record) -> None:
        if record.get("kind") == "sample":
            as_code = indent(record["prompt"] + record["text"], "    ", lambda text: True)  # Markdown would change it
            writer.add_text(f"samples/{' '.join(record['prompt'].split())[:60]}", as_code, record["step"])
        for name, value in flat_values(record).items():
            writer.add_scalar(name, value, record["step"])
        if record.get("kind") in ENDS:
            writer.close()

    return show, ""


def open_trackio(config: Config) -> Tracker:
    """The run in trackio's own folder, or where its variables say (log.trackio); all starts are one run, by its name.
    What it prints is left out: the notes of this file say what matters."""
    import trackio

    of: dict[str, Any] = {"project": config.log.trackio_project, "name": config.run_name, "config": as_plain(config)}
    with redirect_stdout(StringIO()):
        run = trackio.init(**of, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def show(record: Record) -> None:
        if values := flat_values(record):
            run.log(values, step=record["step"])
        if record.get("kind") in ENDS:
            with redirect_stdout(StringIO()):
                trackio.finish()

    return show, ""


def open_wandb(config: Config, folder: Path, mode: str | None, note: Note) -> Tracker | None:
    """The run at wandb, or on disk where it cannot be sent now. `mode` None: only if a key is set up."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]  # wandb takes empty variables for values
    folders = {"WANDB_DATA_DIR": str(folder / "wandb"), "WANDB_CACHE_DIR": str(folder / "wandb" / "cache")}
    os.environ.update({**VARIABLES, **folders, **os.environ})
    import wandb

    log, samples = config.log, list[list[Any]]()  # rows of the table of the newest step
    if not (path := folder / ID_FILE).exists():
        write_atomically(path, (json.dumps({"id": secrets.token_hex(8)}) + "\n").encode())
    known = read_object(path, "delete it; the run is a new one at wandb then")  # the same id for all starts
    name = log.wandb_name or os.environ.get("WANDB_NAME") or config.run_name
    place: dict[str, Any] = {"project": log.wandb_project, "entity": log.wandb_entity, "dir": folder, "name": name}
    init, run = partial(wandb.init, **place, id=str(known["id"]), resume="allow", config=as_plain(config)), None
    if mode != "offline":
        try:
            wandb.setup(wandb.Settings(mode="online"))
            if wandb.login(prompt=False, verify=False):
                run = init(mode="online")
            else:
                note("no key is set up (wandb login)")
                if mode is None:
                    return None
        except Exception as error:
            note(f"cannot be sent now ({' '.join(str(error).split())[:200]})")
        if run is None:
            wandb.teardown()
    run = init(mode="offline") if run is None else run
    online = [] if run.offline else ["--include-online"]
    rescue = shlex.join(["wandb", "sync", *online, str(Path(run.dir).parent)])
    note(f"offline; to send it later: {rescue}" if run.offline else str(run.url))

    def show(record: Record) -> None:
        values = flat_values(record)
        if record.get("kind") == "sample":
            row = [record["step"], record["prompt"], record["text"]]
            samples[:] = [*(it for it in samples if it[0] == record["step"]), row]
            values["samples"] = wandb.Table(columns=["step", "prompt", "text"], data=[*samples])
        if values:
            run.log(values, step=record["step"])
        if record.get("kind") == "settings_changed":
            run.config.update(as_plain(with_values(config, record["settings"])), allow_val_change=True)
        if record.get("kind") in ENDS:
            try:
                run.finish(exit_code=record["status"])
            except TimeoutError:
                note(f"not everything is sent; to send the rest: {rescue}")

    return show, rescue
