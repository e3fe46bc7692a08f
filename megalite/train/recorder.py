"""What training reports of a run: the protocol of a recorder, and the records that it is given.

Training calls these methods on every rank and knows nothing of what becomes of them. A recorder communicates with no
other rank, and a display that fails must not end the run: only `open` may raise, a UserError. No torch import.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from megalite.train.job import Job

StepPart = Literal["data", "forward", "backward", "exchange", "communication", "optimizer", "other"]  # of a step's time
STEP_PARTS: tuple[StepPart, ...] = ("data", "forward", "backward", "exchange", "communication", "optimizer", "other")
TimedAction = tuple[str, float, float]  # of a schedule, from when to when


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Times and speeds are means over the steps since the record before it (figures.py).

    Figures are raw: nats, seconds, tokens, shares of 1. None is "not known here".
    """

    step: int
    steps: int
    tokens: int  # trained on since step 0
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mean_tokens_per_s: float  # of the whole run
    step_time_s: float
    training_s: float  # of all steps of the run
    memory_gib: float
    data_wait_share: float  # of step_time_s
    time_split: Mapping[StepPart, float] | None = None  # seconds of this rank, by part
    mfu: float | None = None  # PaLM's formula: full attention, no recompute
    mfu_causal: float | None = None
    bad_steps: int = 0  # of the whole run: not applied because loss or gradient was not finite
    loss_scale: float | None = None  # what fp16 multiplied the loss by before backward
    cuts: Mapping[str, int] | None = None  # of packed documents, how many microbatches were cut which way for cp
    moe: Mapping[str, Any] | None = None  # of a model with experts, over the same steps (moe/balance.py, in_numbers)


@dataclass(frozen=True)
class EvaluationRecord:
    """The validation set after one step. `tokens`: trained on since step 0."""

    step: int
    tokens: int
    val_loss: float
    val_perplexity: float
    val_bits_per_byte: float | None
    eval_time_s: float


class Recorder(Protocol):
    """Hears on one rank what happens to a run."""

    def note(self, text: str) -> None:
        """Something that the user should know: a warning, a checkpoint that was passed over."""

    def preparing(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        """How far the preparation of the data is; called often."""

    def open(self, job: "Job") -> None:
        """The job is built: continue the records in its folder. UserError where that cannot be."""

    def run_started(self, hosts: list[str]) -> None:
        """Training begins. `hosts`: where each rank runs."""

    def step(self, record: StepRecord) -> None:
        """A step whose figures are recorded: one in train.log_interval, and the last."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """The validation set was evaluated."""

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Something else happened after `step`: history.py lists the kinds, and what each of them tells."""

    def profiled(self, step: int, trace: Callable[[], bytes]) -> None:
        """The profiler has recorded the step. `trace` makes Chrome's JSON, with the step and its parts as labelled
        ranges; it raises OSError or ValueError where it cannot."""

    def pipeline(self, step: int, ranks: Sequence[Sequence[TimedAction]]) -> None:
        """When each rank of the run's first pipeline did what in the step, in seconds of the time of day."""

    def seals(self) -> dict[str, dict[str, Any]]:
        """Bytes and hash of each file of the record as it is now (train/history.py, Seal), on the rank that writes."""

    def failed(self, error: Exception, *, taken_over: bool = False) -> None:
        """The run ends with an error. `taken_over`: its folder is another job's by now."""

    def finished(self, status: int, stopped_by: str | None) -> None:
        """The run ends in order with this exit status, with all done or because it was asked to stop."""

    def close(self) -> None:
        """Nothing more will be recorded. May be called without `open`."""
