"""When training state is saved, and what happens when that fails: training goes on, the last checkpoint stays.

With `checkpoint.async` a save goes on behind the training until the next one, or the end of the run, waits for it. What
came of it is acted upon only there, at the same step on all ranks; a rank tells of it as soon as it knows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalite.checkpoint.background import BackgroundSaves, PendingSave
from megalite.checkpoint.store import CheckpointError, Piece, Saved, save
from megalite.parallel.context import ParallelContext
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
        self.newest_step = job.resumed_from  # of the newest complete checkpoint, when no save is under way
        self._behind = BackgroundSaves(job.context) if job.config.checkpoint.asynchronous else None
        self._under_way: _UnderWay | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` (the one at the end comes by itself)."""
        interval = self._job.config.checkpoint.interval
        return interval > 0 and step % interval == 0

    def save(self) -> None:
        """Write the state after the last read step, or begin to; a failure is reported, not raised."""
        begun = time.perf_counter()
        self.settle()
        if self._behind is None:
            self._save_now()
            return
        pieces = training_pieces(self._job.training)
        pending = self._behind.begin(pieces, self._write(), begun=begun)
        self._under_way = _UnderWay(self._job.progress.step, pending)

    def save_last(self) -> None:
        """Make sure that the state in which the run ends is on disk."""
        self.settle()
        if self.newest_step != self._job.progress.step:
            self._save_now()

    def tell(self) -> None:
        """Report the save under way if it has ended: this rank alone, which may know before others."""
        ended = self._under_way
        if ended is None or ended.told or not ended.pending.done():
            return
        try:
            self._reporter.saved(ended.pending.result())
        except TakenOverError:  # ends the run: all ranks at once
            return
        except CheckpointError as error:
            self._reporter.not_saved(error)
        except Exception:
            self._under_way = None  # a bug or a lost rank: the end of the run tells of it
            raise
        ended.told = True

    def settle(self) -> None:
        """Wait for the save under way: then `newest_step` is what is on disk. All ranks call it at the same point."""
        ended, self._under_way = self._under_way, None
        if ended is None:
            return
        try:
            saved = ended.pending.result()
        except CheckpointError as error:
            if not ended.told:
                self._reporter.not_saved(error)
            return
        self.newest_step = ended.step
        if not ended.told:
            self._reporter.saved(saved)

    def close(self) -> None:
        """The run ends for another reason, which stays the one that is told. A save under way comes to its end, unless
        it takes longer than ranks wait for each other: its disk may hang for good."""
        ended = self._under_way
        if ended is not None and not ended.pending.wait(self._job.config.parallel.timeout_s):
            self._under_way = None
            self._reporter.not_saved(CheckpointError(f"the checkpoint of step {ended.step} was not finished in time"))
            return
        try:
            self.settle()
        except TakenOverError:
            return
        except Exception as error:
            self._reporter.not_saved(CheckpointError(f"the save under way broke off: {type(error).__name__}: {error}"))

    def _save_now(self) -> None:
        job = self._job
        write = self._write()
        try:
            saved = write(training_pieces(job.training), job.context)
        except CheckpointError as error:
            self._reporter.not_saved(error)
        else:
            self.newest_step = job.progress.step
            self._reporter.saved(saved)

    def _write(self) -> Callable[[Sequence[Piece], ParallelContext], Saved]:
        """What writes the checkpoint of this very step, whenever it is called."""
        job = self._job
        folder, step, state, keep = job.folder, job.progress.step, checkpoint_state(job), job.config.checkpoint.keep
        labels = folder.labels

        def write(pieces: Sequence[Piece], context: ParallelContext) -> Saved:
            try:
                return save(folder.checkpoints, step, pieces, state, context, keep, labels=labels, owned=folder.owned)
            except CheckpointError as error:
                if not context.broadcast_object(folder.owned()):
                    raise TakenOverError(
                        f"{error} Another job writes to this run folder now; this one has ended."
                    ) from None
                raise

        return write


@dataclass
class _UnderWay:
    """A save behind the training."""

    step: int
    pending: PendingSave
    told: bool = False  # its outcome, by this rank
