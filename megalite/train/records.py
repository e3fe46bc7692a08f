"""What a run shows of itself, as plain records: the loop fills them, a view draws them.

Figures are raw (nats, seconds, tokens, shares of 1); None is "not known here". A view decides how they look.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Part = Literal["data", "forward", "backward", "communication", "optimizer", "other"]  # of a step's time
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "communication", "optimizer", "other")


class Mirror(Protocol):
    """A place besides the run folder where a run is shown. It never raises, and never makes training wait."""

    def record(self, record: Mapping[str, Any], /) -> None:
        """metrics.jsonl holds one more line."""

    def sample(self, step: int, prompt: str, text: str, /) -> None:
        """events.jsonl holds one more sample."""

    def finish(self, status: int, /) -> None:
        """The run has written its last line and ends with this exit status."""


@dataclass(frozen=True)
class HeaderView:
    """What is about to be trained. `rows` are (label, text) pairs in the order of showing, e.g. ("data", "...")."""

    title: str  # e.g. "tiny on stdlib"
    rows: list[tuple[str, str]]
    steps: int  # of the whole run
    first_step: int = 0  # steps that an earlier start has done


@dataclass(frozen=True)
class StepView:
    """One optimizer step."""

    step: int
    steps: int
    tokens: int  # trained on since step 0
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    step_time_s: float
    memory_gib: float
    data_wait_share: float  # of step_time_s
    time_split: Mapping[Part, float] | None = None  # seconds of this rank, by part
    mfu: float | None = None  # PaLM's formula: full attention, no recompute
    mfu_causal: float | None = None
    bad_steps: int = 0  # of the whole run: not applied because loss or gradient was not finite
    loss_scale: float | None = None  # what fp16 multiplied the loss by before backward


@dataclass(frozen=True)
class EvaluationView:
    """The validation set after one step."""

    step: int
    loss: float
    perplexity: float
    bits_per_byte: float | None
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What was learned. The curves are (step, loss) points of the whole run, earlier starts included if known."""

    step: int
    steps: int
    tokens: int
    seconds: float  # of this start
    tokens_per_s: float  # median of this start's steps
    run_dir: str
    train_curve: list[tuple[int, float]] = field(default_factory=list)
    validation_curve: list[tuple[int, float]] = field(default_factory=list)
    perplexity: float | None = None
    bits_per_byte: float | None = None
    bad_steps: int = 0
    samples: list[tuple[str, str]] = field(default_factory=list)  # prompts, and what the model wrote after each
    stopped_by: str | None = None  # e.g. "SIGTERM"; None: all steps are done
    command: str = "python pretrain_gpt.py"  # that continues the run
