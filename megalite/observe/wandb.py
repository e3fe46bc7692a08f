"""Shows a run at Weights and Biases (log.wandb), as one run there for all starts of the run.

A run that cannot be sent (no network, no key) is written to the run folder's wandb/, and the user is shown the
`wandb sync` command that sends it later. wandb asks no questions here, and no file that it writes holds the key.
"""

import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.durable_files import write_atomically
from megalite.config.machine_rules import asked_mode
from megalite.config.packages import is_installed
from megalite.config.schema import Config
from megalite.config.settings import as_plain
from megalite.train.history import Note

if TYPE_CHECKING:
    import wandb

ID_FILE = "wandb.json"  # of the run folder
NO_KEY = "disabled, no key is set up (wandb login, or log.wandb=offline)"
NO_PACKAGE = "disabled, a key may be set up but the package is not installed (pip install wandb)"
SETTINGS = {  # of wandb, unless the user's own variables say otherwise
    "WANDB_INIT_TIMEOUT": "10",  # seconds for the server to open the run; by default 90
    "WANDB_FINISH_TIMEOUT": "5",  # seconds at the end of a run for what is not sent yet; by default without end
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
    "WANDB_SILENT": "true",  # the notes of this file say what matters
    "WANDB_CONSOLE": "off",  # the run folder has the logs
    "WANDB_DISABLE_GIT": "true",  # the address of a remote may hold a password
    "WANDB_ERROR_REPORTING": "false",
}


class WandbTracker:
    """An open run at wandb. Records keep the names that they have in metrics.jsonl, and `step` is the x axis."""

    def __init__(self, run: "wandb.Run", note: Note) -> None:
        self._run, self._note = run, note
        self._samples: list[list[Any]] = []  # rows of the table of the newest step
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        note(f"offline; to send it later: {self._sync_command()}" if run.offline else str(run.url))

    def add(self, line: Mapping[str, Any]) -> None:
        if line.get("kind") == "sample":
            self._samples.append([line["step"], line["prompt"], line["text"]])
        elif "kind" not in line:
            try:
                self._send_samples()
            finally:  # for a table wandb asks its server, which may fail
                self._run.log(flat_values(line))

    def finish(self, status: int) -> None:
        try:
            self._send_samples()
        finally:
            try:
                self._run.finish(exit_code=status)
            except TimeoutError:
                self._note(f"not everything is sent; to send the rest: {self._sync_command()}")

    def _send_samples(self) -> None:
        if not self._samples:
            return
        from wandb import Table

        rows, self._samples = self._samples, []
        self._run.log({"step": rows[0][0], "samples": Table(columns=["step", "prompt", "text"], data=rows)})

    def _sync_command(self) -> str:
        online = [] if self._run.offline else ["--include-online"]
        return shlex.join(["wandb", "sync", *online, str(Path(self._run.dir).parent)])


def flat_values(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The known values of a record by name. Nested ones get names like `time_split/forward`, which wandb and
    TensorBoard show as groups."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= flat_values(value, f"{prefix}{name}/")
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat


def wandb_tracker(config: Config, folder: Path, note: Note) -> Callable[[], WandbTracker | None] | None:
    """What opens the run at wandb; None where it is not asked for."""
    mode = asked_mode(config.log.wandb, os.environ)
    if mode is None and not (_may_have_key() and is_installed("wandb")):
        note(NO_PACKAGE if _may_have_key() else NO_KEY)
        return None
    return None if mode == "disabled" else partial(_open, config, folder, mode, note)


def _open(config: Config, folder: Path, mode: str | None, note: Note) -> WandbTracker | None:
    """The run at wandb, or on disk where it cannot be sent now. `mode` None: only if a key is set up."""
    _prepare_environment(folder)
    import wandb

    def start(mode: Any) -> WandbTracker:
        run = wandb.init(
            dir=folder,
            id=_run_id(folder),
            resume="allow",
            mode=mode,
            project=config.log.wandb_project,
            entity=config.log.wandb_entity,
            name=config.log.wandb_name or os.environ.get("WANDB_NAME") or config.run_name,
            config=as_plain(config),
        )
        return WandbTracker(run, note)

    if mode == "offline":
        return start("offline")
    try:
        wandb.setup(wandb.Settings(mode="online"))
        if wandb.login(prompt=False, verify=False):
            return start("online")
        if mode is None:
            note(NO_KEY)
            return None
        note("no key is set up (wandb login)")
    except Exception as error:
        note(f"cannot be sent now ({' '.join(str(error).split())[:200]})")
    wandb.teardown()
    return start("offline")


def _run_id(folder: Path) -> str:
    """The run's id at wandb, the same for all starts. A file that holds none (a full disk, a kill) gets a new one."""
    path = folder / ID_FILE
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        run_id = secrets.token_hex(8)
        write_atomically(path, (json.dumps({"id": run_id}) + "\n").encode())
        return run_id


def _may_have_key() -> bool:
    """Whether there is anything in which wandb looks for a key. Asking wandb itself takes an import of a second."""
    settings = os.path.join(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", "settings")
    files = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc", settings]
    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    return any(map(os.environ.get, variables)) or any(os.path.exists(os.path.expanduser(file)) for file in files)


def _prepare_environment(folder: Path) -> None:
    """wandb's own files stay in the run folder. Empty variables go: wandb takes them for values."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]
    folders = {"WANDB_DATA_DIR": str(folder / "wandb"), "WANDB_CACHE_DIR": str(folder / "wandb" / "cache")}
    os.environ.update({**SETTINGS, **folders, **os.environ})
