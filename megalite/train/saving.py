"""When training state is saved, and what happens when that fails: training goes on, the last checkpoint stays."""

from megalite.checkpoint.store import CheckpointError, save
from megalite.train.job import Job, checkpoint_state
from megalite.train.reporter import Reporter
from megalite.train.state import training_pieces


class TakenOverError(RuntimeError):
    """The run belongs to another job by now."""


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self._job = job
        self._reporter = reporter
        self.newest_step = job.resumed_from  # step of the newest complete checkpoint

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` (the one at the end comes by itself)."""
        interval = self._job.config.checkpoint.interval
        return interval > 0 and step % interval == 0

    def save(self) -> None:
        """Write the state after the last read step; a failure is reported, not raised."""
        job = self._job
        try:
            saved = save(
                job.folder.checkpoints,
                job.progress.step,
                training_pieces(job.buffers, job.optimizer),
                checkpoint_state(job),
                job.context,
                keep=job.config.checkpoint.keep,
                labels=job.folder.labels,
                owned=job.folder.owned,
            )
        except CheckpointError as error:
            if not job.context.broadcast_object(job.folder.owned()):
                raise TakenOverError(
                    f"{error} Another job writes to this run folder now; this one has ended."
                ) from None
            self._reporter.not_saved(error)
        else:
            self.newest_step = job.progress.step
            self._reporter.saved(saved)

    def save_last(self) -> None:
        """Make sure that the state in which the run ends is on disk."""
        if self.newest_step != self._job.progress.step:
            self.save()
