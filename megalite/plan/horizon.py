"""How long a run is, whichever way its command says it: in steps, tokens, tokens per parameter, FLOPs or epochs.

A run consumes whole sequences of train.seq_length tokens, those of train.skip_steps too. Parameters are those that a
token meets (of experts the chosen ones), embeddings included, a tied one once. FLOPs are those by which MFU is told. An
epoch of a blend is as many samples as all of its parts have together, whichever parts they come from.
"""

from fractions import Fraction
from math import ceil

from megalite.config.derive import derive_lengths
from megalite.config.length_rules import LENGTH_RULES
from megalite.config.rule import Case, example, problems_of
from megalite.config.schema import MOST_STEPS, Config
from megalite.config.settings import SETTINGS, value_of
from megalite.config.step_plan import horizon_of, steps_to
from megalite.data.open import OpenedData
from megalite.errors.problems import Problem, UserError, refuse, several
from megalite.model.flops import active_parameters, flops_per_token
from megalite.train.saving import Progress


def samples_of_one(config: Config, data: OpenedData) -> dict[str, Fraction]:
    """The samples that a unit of each horizon takes: a token, a token per parameter, a FLOP, an epoch."""
    length, model = config.train.seq_length, config.model
    return {
        "train.tokens": Fraction(1, length),
        "train.tokens_per_parameter": Fraction(active_parameters(model), length),
        "train.flops": 1 / (Fraction(flops_per_token(model, length, causal=False)) * length),
        "train.epochs": Fraction(sum(part.samples(length) for part in data.train.parts)),
    }


def with_steps(config: Config, data: OpenedData, progress: Progress) -> Config:
    """A copy of a derived config that knows its steps and what follows from them: those that were done, and as many as
    the horizon still takes. UserError where that does not suit other settings."""
    name = horizon_of(config.train)
    if name == "train.steps":
        return config
    wanted = ceil(Fraction(str(value_of(config, name))) * samples_of_one(config, data)[name])
    steps = steps_to(config.train, wanted, done=progress.step, samples=progress.samples)
    if steps > MOST_STEPS:
        rule = f"takes {steps:,} steps, more than {MOST_STEPS:,}"
        raise UserError(Problem(name, value_of(config, name), rule, f"less, like {example(SETTINGS[name])}"))
    config = derive_lengths(config, steps)
    refuse(problems_of(Case(config, 1), LENGTH_RULES))
    return config


def length_words(config: Config, data: OpenedData, samples: int) -> str:
    """How long a run of so many samples is, in every way."""
    amounts = {name: samples / one for name, one in samples_of_one(config, data).items()}
    tokens, per_parameter, flops, epochs = map(float, amounts.values())
    most, parts = max(data.train.epochs(samples)), len(data.train.parts)
    words = [f"{several(config.train.steps, 'step')}: {tokens:,.0f} tokens"]
    words.append(f"{_short(per_parameter)} tokens per parameter")
    words.append(f"{flops:.2e} FLOPs".replace("e+0", "e").replace("e+", "e"))
    words.append(f"{_short(epochs)} epochs")
    return ", ".join([*words, *([f"{_short(most)} of the part that is repeated most"] if parts > 1 else [])])


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
