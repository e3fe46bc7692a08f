"""The views of a run on rank 0 (train/run_log.py, View): the report, the trackers, and last the terminal, so that the
summary stands below what the others have to say."""

from collections.abc import Sequence

from megalite.observe.report.write import LiveReport
from megalite.observe.run_data import read_run
from megalite.observe.terminal import Terminal
from megalite.observe.trackers import open_trackers
from megalite.train.history import Note
from megalite.train.run_log import View
from megalite.train.setup import Job


def open_views(job: Job, terminal: Terminal, note: Note) -> Sequence[View]:
    """The views of a run that continues what its folder holds. UserError where that cannot be."""
    run = read_run(job.folder.path)
    trackers = open_trackers(job.config, job.folder.path, job.progress.step, note)
    terminal.follow(run, f"{job.config.model.name} on {job.config.data.source}")
    return [LiveReport(run, job.config.log.report_interval_s), trackers, terminal]
