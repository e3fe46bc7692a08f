"""What a run shows of itself, as plain records: the loop fills them, a view draws them.

Figures are raw (nats, seconds, tokens, shares of 1); None is "not known here". A view decides how they look.
"""

from dataclasses import dataclass, field


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
    sample: str | None = None  # text that the model wrote
    sample_prompt: str = ""
    stopped_by: str | None = None  # e.g. "SIGTERM"; None: all steps are done
    command: str = "python pretrain_gpt.py"  # that continues the run
