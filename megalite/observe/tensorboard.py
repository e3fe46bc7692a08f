"""Shows a run in TensorBoard: event files in the run folder's tensorboard/ (log.tensorboard=true)."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from megalite.observe.flat import flat_values

FOLDER = "tensorboard"  # of the run folder
FLUSH_S = 10  # seconds after which a record is on disk


class TensorBoardTracker:
    """Writes every number of a record as a scalar, and samples as text."""

    def __init__(self, folder: Path, step: int) -> None:
        """The run continues after `step`: what an earlier start wrote of later steps is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=step + 1, flush_secs=FLUSH_S)

    def record(self, record: Mapping[str, Any]) -> None:
        for name, value in flat_values(record).items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def sample(self, step: int, prompt: str, text: str) -> None:
        as_code = indent(prompt + text, "    ", lambda line: True)  # Markdown would change it
        self._writer.add_text(f"samples/{' '.join(prompt.split())[:60]}", as_code, step)

    def finish(self, status: int) -> None:
        self._writer.close()
