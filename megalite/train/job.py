"""One run on this rank: all that it consists of, and where it stands."""

from dataclasses import dataclass, field
from typing import Any

from megalite.checkpoint.run_folder import RunFolder
from megalite.config.schema import Config
from megalite.data.open import OpenedData
from megalite.errors.problems import Problem
from megalite.launch.context import ParallelContext
from megalite.launch.signals import StopRequest
from megalite.launch.watchdog import SAVES, Doing, Patience
from megalite.train.build import Training
from megalite.train.sample import Prompt
from megalite.train.state import Progress


@dataclass
class Job:
    """One run on this rank. setup.py builds it, loop.py moves it on."""

    config: Config
    context: ParallelContext
    data: OpenedData
    folder: RunFolder
    training: Training
    prompts: list[Prompt]  # of the samples of text
    hosts: list[str]  # where each rank runs
    progress: Progress = field(default_factory=Progress)

    # From the checkpoint that the run continues from, and from the records beside it.
    resumed_from: int | None = None  # step of the checkpoint
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # name -> hash
    seals: dict[str, Any] = field(default_factory=dict)  # a history.Seal of each file of the record
    measured: dict[str, Any] = field(default_factory=dict)  # the newest line of a step
    finished: bool = False  # an earlier start has done and recorded everything: this one leaves the folder as it is

    # Where this start stands.
    stop: StopRequest | None = None
    stopping: bool = False  # all ranks know that one of them was asked to stop
    problems: list[Problem] = field(default_factory=list)  # of the input that this rank has read: no step is applied
    under_way: bool = False  # the first step is done: from now on no rank is late for a good reason
    saving: bool = False  # training waits for a save
    newest_step: int = 0  # that was begun
    evaluated_step: int = -1  # the newest one
    sampled_step: int = -1

    @property
    def stop_is_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.stop is not None and self.stop.requested is not None

    def go_on(self) -> bool:
        """Whether no rank was asked to stop; collective, one small all-reduce on the host."""
        asked = [True] if self.stop_is_requested else []
        self.stopping = self.stopping or any(self.context.gather_json(asked))
        return not self.stopping

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations; 0: there are none."""
        return 0 if self.data.validation is None else self.config.train.eval_interval

    def owes_evaluation(self) -> bool:
        """Whether the evaluation that is due after the newest step has not been done."""
        step, interval = self.progress.step, self.evaluation_interval
        due = interval > 0 and step > 0 and (step % interval == 0 or step == self.config.train.steps)
        return due and self.evaluated_step != step

    @property
    def complete(self) -> bool:
        """Whether nothing of the run remains to be done."""
        return self.progress.step >= self.config.train.steps and not self.owes_evaluation()

    def doing(self) -> Doing:
        """This rank's place in training, for the watchdog."""
        if self.saving:
            return Doing("save", "in a save", SAVES)
        part, executor = self.training.clock.part, self.training.executor
        words = f"step {self.newest_step}, {part}, pass {executor.at or 'none yet'}"
        return Doing((self.newest_step, self.evaluated_step, part, executor.performed), words)

    def patience(self) -> Patience:
        """How long nothing may go on."""
        name = "timeout_s" if self.under_way else "startup_timeout_s"
        return Patience(f"parallel.{name}", getattr(self.config.parallel, name))
