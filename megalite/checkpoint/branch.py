"""Where a branch begins: a link to the checkpoint of the run that it leaves, and that run's metrics up to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.commit import CHECKPOINTS, committed, step_name
from megalite.checkpoint.reading import Found, inspect
from megalite.checkpoint.run_folder import RunFolder, compare
from megalite.config.branch import BRANCH
from megalite.config.files import read_bytes, write_atomically
from megalite.errors.problems import Problem, UserError, refuse
from megalite.launch.context import ParallelContext

METRICS = "metrics.jsonl"


def branch_off(folder: RunFolder, place: str, run: Path, step: int, settings: Mapping[str, Any]) -> None:
    """Fill the folder of a branch that has no checkpoint yet, on rank 0. UserError where the run's is damaged, or is of
    another training than `settings`."""
    if committed(folder.checkpoints):
        return
    path = run / CHECKPOINTS / step_name(step)
    found = inspect(path, ParallelContext(), json_only=True)
    if not isinstance(found, Found):
        raise UserError(Problem(BRANCH, place, f"it cannot be read: {found}", "another step of that run"))
    refuse(compare(found.state["config"], settings)[0])
    if seal := found.state.get("record", {}).get(METRICS):
        content = read_bytes(run / METRICS, "put it back from a copy")[: seal["bytes"]]
        write_atomically(folder.path / METRICS, content)
    folder.checkpoints.mkdir(exist_ok=True)
    (folder.checkpoints / step_name(step)).symlink_to(path)
