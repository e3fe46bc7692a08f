"""What an evaluation is asked for: the command's own options, and overrides as the training command takes them.

No torch import: mistakes are told at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.part import load_part, names_of
from megalite.config.schema import Config
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect

READ = ("data", "data.*", "device", "precision", "train.seq_length", "train.eval_batches")


@dataclass(frozen=True)
class Request:
    """`config` is that of the overrides over the defaults; `named` are the settings that the user gave."""

    config: Config
    named: frozenset[str]
    batch_size: int  # sequences at a time
    max_tokens: int | None  # None: all there are

    @property
    def own_data(self) -> bool:
        """Whether the model is to be evaluated on what its run held out: no other data is named."""
        return not any(_of_data(name) for name in self.named)


def read_request(words: Sequence[str], *, batch_size: int = 8, max_tokens: int | None = None) -> Request:
    """`words` are overrides. UserError with all that is wrong."""
    problems = [
        Problem(name, value, "must be at least 1", f"{name} {example}")
        for name, value, example in (("--batch-size", batch_size, 8), ("--max-tokens", max_tokens, 100_000))
        if value is not None and value < 1
    ]
    named = names_of(words)
    config = collect(lambda: load_part(words, "an evaluation", READ), problems)
    problems += _without_effect(Request(Config(), named, batch_size, max_tokens))
    if problems or config is None:
        raise UserError(problems)
    return Request(config, named, batch_size, max_tokens)


def _without_effect(request: Request) -> list[Problem]:
    """Options that only have a meaning for other data, or only for the run's own."""
    if not request.own_data:
        if "train.eval_batches" not in request.named:
            return []
        rule = "is for the validation part of a run; other data is evaluated whole"
        return [Problem("train.eval_batches", NO_VALUE, rule, "--max-tokens N")]
    rule = "the run's own validation part is evaluated as in training"
    remedy = "train.eval_batches=N for more or less of it, or name data: data=text data.path=FILE"
    problems = []
    if "train.seq_length" in request.named:
        problems.append(Problem("train.seq_length", NO_VALUE, rule, remedy))
    if request.max_tokens is not None:
        problems.append(Problem("--max-tokens", request.max_tokens, rule, remedy))
    return problems


def _of_data(name: str) -> bool:
    return name == "data" or name.startswith("data.")
