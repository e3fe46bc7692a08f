"""Shows a run at Weights and Biases (log.wandb), as one run there for all starts of the run.

A run that cannot be sent (no network, no key) is written to the run folder's wandb/, and the user is shown the
`wandb sync` command that sends it later. wandb asks no questions here, and no file that it writes holds the key.
"""

import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.durable_files import write_atomically
from megalite.config.machine_rules import asked_mode
from megalite.config.packages import is_installed
from megalite.config.schema import Config
from megalite.config.settings import as_plain
from megalite.config.user_files import read_object
from megalite.train.history import Note

if TYPE_CHECKING:
    import wandb

ID_FILE = "wandb.json"  # of the run folder
LOADS = "expert_load"  # of a line: by layer, what `loads_of_experts` makes of it
NO_KEY = "disabled: that takes a key (wandb login) and the package (pip install wandb); or log.wandb=offline"
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
        if "kind" not in line:
            from wandb import Histogram

            loads = {f"{LOADS}/{layer}": Histogram(row) for layer, row in line.get(LOADS, {}).items()}
            self._run.log(flat_values(line) | loads)
        elif line["kind"] == "sample":
            from wandb import Table

            before = [row for row in self._samples if row[0] == line["step"]]
            self._samples = [*before, [line["step"], line["prompt"], line["text"]]]
            table = Table(columns=["step", "prompt", "text"], data=self._samples)
            self._run.log({"step": line["step"], "samples": table})

    def finish(self, status: int) -> None:
        try:
            self._run.finish(exit_code=status)
        except TimeoutError:
            self._note(f"not everything is sent; to send the rest: {self._sync_command()}")

    def _sync_command(self) -> str:
        online = [] if self._run.offline else ["--include-online"]
        return shlex.join(["wandb", "sync", *online, str(Path(self._run.dir).parent)])


def flat_values(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The known values of a record by name, without lists. Nested ones get names like `time_split/forward`, which wandb
    and TensorBoard show as groups."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= flat_values(value, f"{prefix}{name}/")
        elif value is not None and not isinstance(value, list):
            flat[f"{prefix}{name}"] = value
    return flat


def loads_of_experts(line: Mapping[str, Any], layers: Sequence[int]) -> dict[str, list[float]]:
    """By layer, the tokens of each expert over the mean: trackers draw them as a distribution, as a chart for each
    expert would be too many. Empty of a line without experts."""
    rows = zip(layers, line.get("moe", {}).get("tokens_per_expert", ()), strict=False)
    return {
        f"layer_{layer}": [tokens / mean for tokens in row] for layer, row in rows if (mean := sum(row) / len(row)) > 0
    }


def wandb_tracker(config: Config, folder: Path, note: Note) -> Callable[[], WandbTracker | None] | None:
    """What opens the run at wandb; None where it is not asked for."""
    mode = asked_mode(config.log.wandb, os.environ)
    if mode is None and not (_may_have_key() and is_installed("wandb")):
        note(NO_KEY)
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
        note("no key is set up (wandb login)")
        if mode is None:
            return None
    except Exception as error:
        note(f"cannot be sent now ({' '.join(str(error).split())[:200]})")
    wandb.teardown()
    return start("offline")


def _run_id(folder: Path) -> str:
    """The run's id at wandb, the same for all starts."""
    path = folder / ID_FILE
    if not path.exists():
        write_atomically(path, (json.dumps({"id": secrets.token_hex(8)}) + "\n").encode())
    return str(read_object(path, "delete it; the run is a new one at wandb then").get("id"))


def _may_have_key() -> bool:
    """Whether wandb may find a key. Asking wandb itself takes an import of a second."""
    netrc = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
    return bool(os.environ.get("WANDB_API_KEY")) or os.path.exists(netrc)


def _prepare_environment(folder: Path) -> None:
    """wandb's own files stay in the run folder. Empty variables go: wandb takes them for values."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]
    folders = {"WANDB_DATA_DIR": str(folder / "wandb"), "WANDB_CACHE_DIR": str(folder / "wandb" / "cache")}
    os.environ.update({**SETTINGS, **folders, **os.environ})
