"""What an evaluation is asked for: the command's own options, and overrides as the training command takes them.

No torch import: mistakes are told at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.compose import load_config
from megalite.config.problems import Problem, UserError, collect
from megalite.config.schema import Config
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS

SOURCES = SETTINGS["data.source"].choices
READ = ("device", "precision", "train.seq_length", "train.eval_batches")  # besides those of data


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


def read_request(
    words: Sequence[str], data: str | None = None, *, batch_size: int = 8, max_tokens: int | None = None
) -> Request:
    """`words` are overrides, `data` stands for data=NAME among them. UserError with all that is wrong."""
    problems = [
        Problem(name, value, "must be at least 1", f"{name} {example}")
        for name, value, example in (("--batch-size", batch_size, 8), ("--max-tokens", max_tokens, 100_000))
        if value is not None and value < 1
    ]
    named = [word.partition("=")[0].lstrip("+~") for word in words]
    if data is not None and "data" in named:
        problems.append(Problem("--data", data, "there is a data=NAME, too", "give one of the two"))
    elif data is not None:
        words, named = [f"data={data}", *words], [*named, "data"]
    for name in named:
        if (name in SETTINGS or name in GROUPS or name == EXPERIMENT) and not _of_data(name) and name not in READ:
            remedy = f"what it reads: data=NAME, data.*, {', '.join(READ)}"
            problems.append(Problem(name, ..., "an evaluation does not read it", remedy))
    request = Request(Config(), frozenset(named), batch_size, max_tokens)
    config = collect(lambda: load_config(list(words), 1), problems)
    problems += _without_effect(request)
    if problems or config is None:
        raise UserError(problems)
    return Request(config, request.named, batch_size, max_tokens)


def _without_effect(request: Request) -> list[Problem]:
    """Options that only have a meaning for other data, or only for the run's own."""
    if not request.own_data:
        if "train.eval_batches" not in request.named:
            return []
        rule = "is for the validation part of a run; other data is evaluated whole"
        return [Problem("train.eval_batches", ..., rule, "--max-tokens N")]
    rule = "the run's own validation part is evaluated as in training"
    remedy = "train.eval_batches=N for more or less of it, or name data: --data text data.path=FILE"
    problems = []
    if "train.seq_length" in request.named:
        problems.append(Problem("train.seq_length", ..., rule, remedy))
    if request.max_tokens is not None:
        problems.append(Problem("--max-tokens", request.max_tokens, rule, remedy))
    return problems


def _of_data(name: str) -> bool:
    return name == "data" or name.startswith("data.")
