"""Saves the training state when it is due. When that fails, training goes on, and the last checkpoint stays.

Only finite weights and moments are saved; a run with others has failed. Finite weights are trusted only after a later
step was applied, because that step's loss was computed with them. The newest checkpoint of trusted weights is never
deleted.

With `checkpoint.async` a save goes on behind the training until the next one, or the end of the run, waits for it. An
error that ends the run is raised only there, at the same step on all ranks; everything else a rank reports as soon as
it knows.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from megalite.checkpoint.background import BackgroundSaves
from megalite.checkpoint.commit import committed
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.store import CheckpointError, Saved, save
from megalite.config.settings import as_plain
from megalite.launch.agreement import on_first
from megalite.launch.context import ParallelContext
from megalite.train.setup import Job
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

    def __init__(self, job: Job, saved: Callable[[int], object]) -> None:
        """`saved` is called with the step of each checkpoint that is complete."""
        self._job, self._saved = job, saved
        self.newest_step = job.resumed_from  # of the newest complete checkpoint, when no save is under way
        self._background = BackgroundSaves(job.context) if job.config.checkpoint.asynchronous else None
        if self._background is not None:
            job.training.optimizer.before_change = self._background.before_change
        self._under_way: tuple[int, Future[Saved]] | None = None  # the newest save, and of which step

    def save(self, step: int) -> None:
        """Write the state after `step`, or begin to; a failure is reported, not raised."""
        begun = time.perf_counter()
        with self._training_waits():
            self.wait()
            if self._background is None:
                self._save_now(step)
                return
            pieces = training_pieces(self._job.training)
            self._under_way = step, self._background.begin(pieces, self._writer(step), begun=begun)

    def save_last(self) -> None:
        """Make sure that the state in which the run ends is on disk."""
        with self._training_waits():
            self.wait()
            if self.newest_step != self._job.progress.step:
                self._save_now(self._job.progress.step)

    def report(self) -> None:
        """Report the save under way if it has ended: this rank alone, which may know before others."""
        if self._under_way is None or not (saving := self._under_way[1]).done():
            return
        if not isinstance(saving.exception(), TrainingStoppedError):
            self._finish()

    def wait(self) -> None:
        """Wait for the save under way: then `newest_step` is what is on disk. All ranks call it at the same point."""
        try:
            self._finish()
        except NotFiniteError as error:
            raise TrainingStoppedError(f"{error} {self.advise()}.") from None

    def close(self) -> None:
        """The run ends for another reason, which is the one that is reported. A save under way comes to its end, unless
        it takes longer than ranks wait for each other: its disk may hang for good."""
        if self._under_way is None:
            return
        step, saving = self._under_way
        if futures.wait([saving], self._job.config.parallel.timeout_s).not_done:
            self._under_way = None
            self._not_saved(f"the checkpoint of step {step} was not finished in time")
            return
        try:
            self._finish()
        except TrainingStoppedError:  # others may not be there to find out more together
            return
        except Exception as error:
            self._not_saved(f"the save under way broke off: {type(error).__name__}: {error}")

    def advise(self) -> str:
        """For a run that ends with bad steps: which checkpoint holds good weights, and what to try; collective."""
        self.wait()
        folder, applied = self._job.folder.checkpoints, self._job.progress.last_applied

        def kept() -> str:
            found = committed(folder)
            doubtful = ", ".join(path.name for step, path in reversed(found) if step >= applied)
            good = next((step for step, _ in found if step < applied), None)
            intact, back = "No checkpoint holds earlier weights", "set another run_dir"
            if good is not None:
                intact = f"The checkpoint of step {good} is intact"
                back = f"to go on from step {good}, move newer ones out of {folder}"
            return f"{intact}; the weights that the run ended with are in {doubtful}: {back}" if doubtful else intact

        return f"{on_first(self._job.context, kept)}. {ADVICE}"

    def _save_now(self, step: int) -> None:
        saving: Future[Saved] = Future()
        try:
            saving.set_result(self._writer(step)(training_pieces(self._job.training), self._job.context))
        except Exception as error:
            saving.set_exception(error)
        self._under_way = step, saving
        self.wait()

    def _finish(self) -> None:
        """Wait for the save under way, and report what became of it."""
        if self._under_way is None:
            return
        (step, saving), self._under_way = self._under_way, None
        try:
            with self._training_waits():
                saved = saving.result()
        except CheckpointError as error:
            self._not_saved(str(error))
            return
        self.newest_step = step
        self._saved(step)
        times = {"seconds": round(saved.seconds, 3), "stall_s": round(saved.stall_s, 3)}
        self._job.log.event("checkpoint", step, bytes=saved.bytes, **times)

    def _not_saved(self, message: str) -> None:
        self._job.log.event("checkpoint_failed", self._job.progress.step, message=message)

    @contextmanager
    def _training_waits(self) -> Iterator[None]:
        before, self._job.saving = self._job.saving, True
        try:
            yield
        finally:
            self._job.saving = before

    def _writer(self, step: int) -> Callable[[Sequence[Piece], ParallelContext], Saved]:
        """The function that writes the checkpoint of this very step, whenever it is called."""
        folder, keep, good_before = self._job.folder, self._job.config.checkpoint.keep, self._job.progress.last_applied
        state = checkpoint_state(self._job) | {"record": self._job.log.seals()}

        def write(pieces: Sequence[Piece], context: ParallelContext) -> Saved:
            ruined = [name for of_rank in context.gather_json(not_finite(pieces)[:1]) for name in of_rank]
            if ruined:
                raise NotFiniteError(f"the state after step {step} is not finite ({ruined[0]}), so it is not saved.")
            how: dict[str, Any] = {"labels": folder.labels, "lost": folder.lost, "good_before": good_before}
            try:
                return save(folder.checkpoints, step, pieces, state, context, keep, **how)
            except CheckpointError:
                if why := context.broadcast_object(folder.lost()):
                    message = f"the checkpoint of step {step} was not saved, and this job has ended: {why}"
                    raise TakenOverError(message) from None
                raise

        return write


def checkpoint_state(job: Job) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {
        "progress": dict(vars(job.progress)),
        "loss_scale": None if job.training.loss_scale is None else job.training.loss_scale.state.tolist(),
        "data": {"fingerprint": job.data.fingerprint, "description": job.data.description},
        "layout": {axis: getattr(job.context.layout, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "world_size")},
        "tokenizer": job.tokenizer_files,
        "config": as_plain(job.config),
        "torch": torch.__version__,
    }
