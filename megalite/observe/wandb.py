"""Shows a run at Weights and Biases (log.wandb), as one run there for all starts of the run.

A run that cannot be sent (no network, no key) is written to the run folder's wandb/, and the user is shown the
`wandb sync` command that sends it later. wandb begins every such start at its own `_step` 0. Here a start counts on
from those before. wandb asks no questions here, and no file that it writes holds the key.
"""

import json
import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megalite.config.durable_files import write_atomically
from megalite.config.machine_rules import asked_mode, is_installed
from megalite.config.schema import Config
from megalite.config.settings import as_plain
from megalite.config.user_files import read_object
from megalite.train.history import Note

ID_FILE = "wandb.json"  # of the run folder
STEP = re.compile(rb"_step\x82\x01([\x01-\x13])")  # of a .wandb file: name, tag and length of a value in digits
OF_NETWORK = {  # settings of wandb where it sends, unless the user's own variables say otherwise
    "WANDB_INIT_TIMEOUT": "10",  # seconds for the server to open the run; by default 90
    "WANDB_FINISH_TIMEOUT": "5",  # seconds at the end of a run for what is not sent yet; by default without end
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
}
SETTINGS = {  # in any case
    "WANDB_SILENT": "true",  # the notes of this file say what matters
    "WANDB_CONSOLE": "off",  # the run folder has the logs
    "WANDB_DISABLE_GIT": "true",  # the address of a remote may hold a password
    "WANDB_ERROR_REPORTING": "false",
}


class WandbTracker:
    """An open run at wandb. Records keep the names that they have in metrics.jsonl, and `step` is the x axis."""

    def __init__(self, run: Any, note: Note) -> None:
        self._run, self._note = run, note
        self._samples: list[list[Any]] = []  # rows of the table of the newest step
        self._first = next_step(Path(run.dir).parents[1], run.id) if run.offline else None  # `_step` of the next line
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        note(f"offline; to send it later: {self.rescue}" if run.offline else str(run.url))

    def add(self, record: Mapping[str, Any]) -> None:
        from wandb import Table

        if "kind" not in record:
            values = flat_values(record)
        elif record["kind"] == "sample":
            columns: list[str | int] = ["step", "prompt", "text"]
            row = [record["step"], record["prompt"], record["text"]]
            self._samples = [*(it for it in self._samples if it[0] == record["step"]), row]
            values = {"step": record["step"], "samples": Table(columns=columns, data=self._samples)}
        else:
            return
        # Offline, the first line says where to count on from; wandb counts the others.
        self._run.log(values, step=self._first, commit=None if self._first is None else True)
        self._first = None

    def finish(self, status: int) -> None:
        try:
            self._run.finish(exit_code=status)
        except TimeoutError:
            self._note(f"not everything is sent; to send the rest: {self.rescue}")

    @property
    def rescue(self) -> str:
        """The command that sends what is on disk: of an offline run, all starts that are not sent yet."""
        here, file = Path(self._run.dir).parent, f"run-{self._run.id}.wandb"
        if not self._run.offline:
            return shlex.join(["wandb", "sync", "--include-online", str(here)])
        starts = [path.parent for path in sorted(here.parent.glob(f"offline-run-*/{file}"))]
        unsent = [str(start) for start in starts if not (start / f"{file}.synced").exists()]
        return shlex.join(["wandb", "sync", *(unsent or [str(here)])])


def flat_values(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The known numbers of a record by name. Nested ones get names like `time_split/forward`, which wandb and
    TensorBoard show as groups."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= flat_values(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = value
    return flat


def wandb_tracker(config: Config, folder: Path, note: Note) -> Callable[[], WandbTracker | None] | None:
    """A function that opens the run at wandb; None where wandb is not asked for."""
    mode = asked_mode(config.log.wandb, os.environ)
    netrc = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")  # wandb may find a key there
    has_key = bool(os.environ.get("WANDB_API_KEY")) or os.path.exists(netrc)
    if mode is None and not (has_key and is_installed("wandb")):
        note("disabled: that takes a key (wandb login) and the package (pip install wandb); or log.wandb=offline")
        return None
    return None if mode == "disabled" else partial(_open, config, folder, mode, note)


def _open(config: Config, folder: Path, mode: str | None, note: Note) -> WandbTracker | None:
    """The run at wandb, or on disk where it cannot be sent now. `mode` None: only if a key is set up."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]  # wandb takes empty variables for values
    folders = {"WANDB_DATA_DIR": str(folder / "wandb"), "WANDB_CACHE_DIR": str(folder / "wandb" / "cache")}
    of_network = {name: value for name, value in OF_NETWORK.items() if name not in os.environ and mode != "offline"}
    os.environ.update({**SETTINGS, **folders, **of_network, **os.environ})
    import wandb

    name = config.log.wandb_name or os.environ.get("WANDB_NAME") or config.run_name
    place: dict[str, Any] = {
        "project": config.log.wandb_project,
        "entity": config.log.wandb_entity,
        "name": name,
        "dir": folder,
    }
    start = partial(wandb.init, id=id_of_run(folder, note), resume="allow", config=as_plain(config), **place)
    if mode != "offline":
        try:
            wandb.setup(wandb.Settings(mode="online"))
            if wandb.login(prompt=False, verify=False):
                return WandbTracker(start(mode="online"), note)
            note("no key is set up (wandb login)")
            if mode is None:
                return None
        except Exception as error:
            note(f"cannot be sent now ({' '.join(str(error).split())[:200]})")
        wandb.teardown()
        for name in of_network:  # a busy machine needs longer than a network may
            del os.environ[name]
    return WandbTracker(start(mode="offline"), note)


def id_of_run(folder: Path, note: Note) -> str:
    """The run's id at wandb, the same for all starts. A copy of a run folder gets an id of its own: it is a copy where
    the folder that the id was made for is still there with it, else it was moved."""
    path, here = folder / ID_FILE, str(folder.resolve())
    known = read_object(path, "delete it; the run is a new one at wandb then") if path.exists() else {}
    run_id, place = known.get("id"), str(known.get("run_dir", here))
    original = Path(place) / ID_FILE
    if place != here and original.exists() and not os.path.samefile(original, path):
        note(f"this folder is a copy of {place}, which keeps its run {run_id}: here it is a new run")
        run_id = None
    if run_id is None or place != here:
        run_id = run_id or secrets.token_hex(8)
        write_atomically(path, (json.dumps({"id": run_id, "run_dir": here}) + "\n").encode())
    return str(run_id)


def next_step(folder: Path, run_id: str) -> int:
    """wandb's `_step` behind those of all starts of a run that its files in `folder` hold."""
    steps = [-1]
    for path in folder.glob(f"*run-*/run-{run_id}.wandb"):
        content = path.read_bytes()
        digits = (content[found.end() : found.end() + found[1][0]] for found in STEP.finditer(content))
        steps += [int(value) for value in digits if value.isdigit()]
    return max(steps) + 1
