"""What rank 0 keeps of a run: metrics.jsonl, events.jsonl, report.html and, if there is one, a mirror elsewhere.

All of them are told the same, in this order. A file that cannot be written (a full disk) costs lines and is told once,
until it can be written again; it never ends the run.
"""

from collections.abc import Callable
from typing import Any

from megalite.config.settings import as_plain
from megalite.train.events import FILE, EventsFile, event
from megalite.train.job import Job
from megalite.train.metrics import MetricsFile, read_metrics
from megalite.train.records import Mirror
from megalite.train.report.data import gather
from megalite.train.report.write import LiveReport

METRICS = "metrics.jsonl"


class Chronicle:
    """The records of one run, on the rank that writes them."""

    def __init__(self, job: Job, tell: Callable[[str], None], mirror: Mirror | None) -> None:
        """Continues what the run folder holds. Raises UserError where that cannot be."""
        folder = job.folder.path
        self._tell, self._mirror = tell, mirror
        self.metrics_path = folder / METRICS
        self._metrics = MetricsFile(self.metrics_path, resume_step=job.progress.step)
        self._events = EventsFile(folder)
        self._behind: set[str] = set()  # files whose last line could not be written
        self._run = gather(folder, as_plain(job.config), read_metrics(self.metrics_path))
        self._report = LiveReport(self._run, job.config.log.report_interval_s, tell)

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics."""
        self._attempt(METRICS, lambda: self._metrics.append(line))
        self._run.record(line)
        if self._mirror is not None:
            self._mirror.record(line)
        self._report.refresh()

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Something that happened, see events.py."""
        line = event(kind, step, **fields)
        self._attempt(FILE, lambda: self._events.append(line))
        self._run.happened(line)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """What the model makes of a prompt."""
        self.event("sample", step, prompt=prompt, text=text)
        if self._mirror is not None:
            self._mirror.sample(step, prompt, text)

    def end(self, kind: str, step: int, *, status: int, **fields: Any) -> None:
        """The run has ended: `stopped`, `finished` or `failed`, with this exit status."""
        self.event(kind, step, status=status, **fields)
        self._report.draw(live=False)
        if self._mirror is not None:
            self._mirror.finish(status)

    def close(self) -> None:
        """Nothing more will be told."""
        self._metrics.close()
        self._events.close()

    def _attempt(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if name not in self._behind:
                self._tell(f"warning: {name} cannot be written for now: {error.strerror}")
            self._behind.add(name)
        else:
            self._behind.discard(name)
