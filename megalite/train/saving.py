"""When training state is saved, and what happens when that fails: training goes on, the last checkpoint stays.

Only finite weights and moments are saved; where they are not, the run has failed. Weights that are finite may still be
of no use: they count as good once a later step was applied, as its loss was theirs. The newest checkpoint of such
weights is never deleted.

With `checkpoint.async` a save goes on behind the training until the next one, or the end of the run, waits for it. What
came of it is acted upon only there, at the same step on all ranks; a rank reports it as soon as it knows.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.background import BackgroundSaves
from megalite.checkpoint.commit import committed, step_name
from megalite.checkpoint.store import CheckpointError, Piece, Saved, save
from megalite.launch.context import ParallelContext
from megalite.train.job import Job, checkpoint_state
from megalite.train.recorder import Recorder
from megalite.train.state import not_finite, training_pieces

ADVICE = (
    "Try a lower optimizer.lr, a longer lr.warmup_steps, a smaller optimizer.clip_grad, precision=fp32, or look at the "
    "data of these steps"
)


class TrainingStoppedError(RuntimeError):
    """The run cannot go on; the message, the same on all ranks, says why and what to try."""


class TakenOverError(TrainingStoppedError):
    """The run folder is another job's by now, or somewhere else."""


class NotFiniteError(TrainingStoppedError):
    """The state that was to be saved is of no use."""


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job = job
        self._recorder = recorder
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
        self.wait()
        if self._behind is None:
            self._save_now()
            return
        pieces = training_pieces(self._job.training)
        pending = self._behind.begin(pieces, self._write(), begun=begun)
        self._under_way = _UnderWay(self._job.progress.step, pending)

    def save_last(self) -> None:
        """Make sure that the state in which the run ends is on disk."""
        self.wait()
        if self.newest_step != self._job.progress.step:
            self._save_now()

    def report(self) -> None:
        """Report the save under way if it has ended: this rank alone, which may know before others."""
        ended = self._under_way
        if ended is None or ended.reported or not ended.pending.done():
            return
        try:
            self._recorder.saved(ended.pending.result())
        except TrainingStoppedError:  # all ranks at once
            return
        except CheckpointError as error:
            self._recorder.not_saved(error)
        except Exception:
            self._under_way = None  # a bug or a lost rank: the end of the run tells of it
            raise
        ended.reported = True

    def wait(self) -> None:
        """Wait for the save under way: then `newest_step` is what is on disk. All ranks call it at the same point."""
        with self._with_advice():
            self._wait()

    def _wait(self) -> None:
        ended, self._under_way = self._under_way, None
        if ended is None:
            return
        try:
            saved = ended.pending.result()
        except CheckpointError as error:
            if not ended.reported:
                self._recorder.not_saved(error)
            return
        self.newest_step = ended.step
        if not ended.reported:
            self._recorder.saved(saved)

    def what_now(self) -> str:
        """For a run that ends with bad steps: which checkpoint holds good weights, and what to try; collective."""
        self.wait()
        job, kept = self._job, ""
        if job.context.rank == 0:
            folder, applied = job.folder.checkpoints, job.progress.last_applied
            steps = sorted(step for step, _ in committed(folder))
            good = [step for step in steps if step < applied]
            kept = f"The checkpoint of step {good[-1]} is intact" if good else "No checkpoint holds earlier weights"
            if doubtful := [step_name(step) for step in steps if step >= applied]:
                hold, them = ("holds", "it") if len(doubtful) == 1 else ("hold", "them")
                back = f"to go on from step {good[-1]}, move {them} out of {folder}" if good else "set another run_dir"
                kept += f"; {', '.join(doubtful)} {hold} the weights that the run ended with: {back}"
        return f"{job.context.broadcast_object(kept)}. {ADVICE}"

    def close(self) -> None:
        """The run ends for another reason, which stays the one that is told. A save under way comes to its end, unless
        it takes longer than ranks wait for each other: its disk may hang for good."""
        ended = self._under_way
        if ended is not None and futures.wait([ended.pending], self._job.config.parallel.timeout_s).not_done:
            self._under_way = None
            self._recorder.not_saved(CheckpointError(f"the checkpoint of step {ended.step} was not finished in time"))
            return
        try:
            self._wait()
        except TrainingStoppedError:  # others may not be there to find out more together
            return
        except Exception as error:
            self._recorder.not_saved(CheckpointError(f"the save under way broke off: {type(error).__name__}: {error}"))

    def _save_now(self) -> None:
        job = self._job
        write = self._write()
        try:
            with self._with_advice():
                saved = write(training_pieces(job.training), job.context)
        except CheckpointError as error:
            self._recorder.not_saved(error)
        else:
            self.newest_step = job.progress.step
            self._recorder.saved(saved)

    @contextmanager
    def _with_advice(self) -> Iterator[None]:
        try:
            yield
        except NotFiniteError as error:
            raise TrainingStoppedError(f"{error} {self.what_now()}.") from None

    def _write(self) -> Callable[[Sequence[Piece], ParallelContext], Saved]:
        """What writes the checkpoint of this very step, whenever it is called."""
        job = self._job
        folder, step, state, keep = job.folder, job.progress.step, checkpoint_state(job), job.config.checkpoint.keep
        how: dict[str, Any] = {"labels": folder.labels, "lost": folder.lost, "good_before": job.progress.last_applied}

        def write(pieces: Sequence[Piece], context: ParallelContext) -> Saved:
            ruined = [name for of_rank in context.gather_json(not_finite(pieces)[:1]) for name in of_rank]
            if ruined:
                raise NotFiniteError(f"the state after step {step} is not finite ({ruined[0]}), so it is not saved.")
            try:
                return save(folder.checkpoints, step, pieces, state, context, keep, **how)
            except CheckpointError:
                if why := context.broadcast_object(folder.lost()):
                    said = f"the checkpoint of step {step} was not saved, and this job has ended: {why}"
                    raise TakenOverError(said) from None
                raise

        return write


@dataclass
class _UnderWay:
    """A save behind the training."""

    step: int
    pending: Future[Saved]
    reported: bool = False  # its outcome, by this rank
