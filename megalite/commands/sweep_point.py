"""One point of a sweep: a training in processes of its own, outside Hydra, and the loss that it ends with.

Hydra's launchers call `train_point` in this process or in another one, perhaps on another machine. A file in the
sweep's folder says that the sweep is to stop: what trains is asked to, as a scheduler asks, and what waits does not
start. Nothing that goes wrong with one point is raised, so the others go on.
"""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megalite.config.compose import CONF, PACKAGE, load_config
from megalite.config.own_presets import SEARCH_PATH
from megalite.config.user_files import as_record, read_json
from megalite.errors.problems import UserError
from megalite.train.history import read_metrics

STOP = "stop"  # in the sweep's folder; from three bytes on, nobody waits any more
PATIENCE = 3
RECORD = "point.json"


@dataclass(frozen=True)
class PointRecord:
    """What became of a point; its file is in the folder that Hydra made for it."""

    words: list[str]
    run_dir: str
    status: str  # trained, stopped or failed
    val_loss: float | None

    def line(self, everywhere: set[str]) -> str:
        """It in a line, without the overrides that all points have."""
        own = " ".join(word for word in self.words if word not in everywhere) or "(no overrides of its own)"
        loss = "" if self.val_loss is None else f", validation loss {self.val_loss:.4f}"
        return f"{own}: {self.status}{loss}{f'; {self.run_dir}' if self.run_dir else ''}"

    def metrics(self) -> Path:
        return Path(self.run_dir or "/nowhere", "metrics.jsonl")


def records_of(folder: Path) -> list[PointRecord]:
    """Those of all points of a sweep, in their order."""
    paths = sorted(folder.rglob(RECORD), key=lambda path: (len(path.parent.name), path.parent.name))
    return [as_record(PointRecord, read_json(path), path) for path in paths]


def train_point(config: DictConfig) -> float:
    """Train what Hydra composed; the final validation loss, NaN where there is none."""
    hydra = HydraConfig.get()
    words = [word for word in hydra.overrides.task if not word.lstrip("+").startswith("sweep.")]
    folder = Path(hydra.runtime.output_dir)
    stop = Path(hydra.runtime.cwd, hydra.sweep.dir, STOP)
    alone = hydra.runtime.choices["hydra/launcher"] == "basic"  # else several points write at once
    ranks = int(config.sweep.nproc_per_node) if "sweep" in config else 1
    record = PointRecord(words, "", "stopped", None)
    try:
        run_dir = str(load_config([*_flags(hydra), *words], ranks).run_dir)
        record = PointRecord(words, run_dir, "stopped", None)
        if not stop.exists():
            command = _command(ranks, [*_flags(hydra), *words])
            with open(os.devnull if alone else folder / "output.log", "wb") as log:
                status = _run(command, None if alone else log, stop)
            outcome = "stopped" if stop.exists() else "failed" if status else "trained"
            loss = _final_loss(record.metrics()) if outcome == "trained" else None
            record = PointRecord(words, run_dir, outcome, loss)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        record = PointRecord(words, record.run_dir, "failed", None)
    (folder / RECORD).write_text(json.dumps(asdict(record)))
    return math.nan if record.val_loss is None else record.val_loss


def _flags(hydra: HydraConf) -> list[str]:
    """Where Hydra found its config, as words of the launcher."""
    flags = ["--config-name", str(hydra.job.config_name)] if hydra.job.config_name != "config" else []
    for source in hydra.runtime.config_sources:
        if source.provider == "main" and Path(source.path) != CONF:
            flags += ["--config-path", source.path]
    return [*flags, *(word for word in hydra.overrides.hydra if word.startswith(SEARCH_PATH))]


def _command(ranks: int, words: Sequence[str]) -> list[str]:
    launcher = PACKAGE.parent / "pretrain_gpt.py"
    program = [str(launcher)] if launcher.is_file() else ["-m", "megalite", "train"]
    if ranks > 1:
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    return [sys.executable, *program, *words]


def _run(command: list[str], output: IO[bytes] | None, stop: Path) -> int:
    """The status of a child, which is in a session of its own: a terminal's Ctrl-C reaches it through the stop file."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a launcher's worker, not the driver
        with suppress(ValueError):  # not its main thread, where signals do not come
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    asked = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(0.3)
        if stop.exists() and not asked:
            child.terminate()
            asked = True
        if asked and stop.stat().st_size >= PATIENCE:
            os.killpg(child.pid, signal.SIGKILL)


def _final_loss(metrics: Path) -> float | None:
    losses = [line["val_loss"] for line in read_metrics(metrics) if "val_loss" in line]
    return losses[-1] if losses else None
