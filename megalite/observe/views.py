"""What is shown of a run besides its records: the header and the summary, and the protocol of a tracker elsewhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Tracker(Protocol):
    """A place beside the run folder where a run is shown, such as wandb. It neither raises nor makes training wait."""

    def record(self, record: Mapping[str, Any], /) -> None:
        """metrics.jsonl holds one more line."""

    def sample(self, step: int, prompt: str, text: str, /) -> None:
        """events.jsonl holds one more sample."""

    def finish(self, status: int, /) -> None:
        """The run has written its last line and ends with this exit status."""


Tell = Callable[[str], None]  # prints a line for the user


@dataclass(frozen=True)
class HeaderView:
    """What is about to be trained. `rows` are (label, text) pairs in the order of showing, e.g. ("data", "...")."""

    title: str  # e.g. "tiny on stdlib"
    rows: list[tuple[str, str]]
    steps: int  # of the whole run
    first_step: int = 0  # steps that an earlier start has done


@dataclass(frozen=True)
class Summary:
    """What was learned. The curves are (step, loss) points of the whole run, earlier starts included if known."""

    step: int
    steps: int
    tokens: int
    seconds: float  # of this start
    tokens_per_s: float  # mean of the whole run (figures.py)
    newest_tokens_per_s: float  # as the last shown step has it
    run_dir: str
    train_curve: list[tuple[int, float]] = field(default_factory=list)
    validation_curve: list[tuple[int, float]] = field(default_factory=list)
    perplexity: float | None = None
    bits_per_byte: float | None = None
    bad_steps: int = 0
    samples: list[tuple[str, str]] = field(default_factory=list)  # prompts, and what the model wrote after each
    stopped_by: str | None = None  # e.g. "SIGTERM"; None: all steps are done
    command: str = "python pretrain_gpt.py"  # that continues the run
