"""Every rule that a config must keep, in one flat list, and the check that asks them all.

`bounds.py` judges each setting on its own. A rule of `RULES` joins several and says by formula what would work
(`remedies.py`); those of ranks are in `parallel_rules.py`, those of the optimizer in `optimizer_rules.py`. What this
machine must have is in `machine_rules.py`. A rule that speaks of a setting that is already refused stays silent.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from megalite.config.bounds import bounds, with_defaults
from megalite.config.derive import derive_model
from megalite.config.machine_rules import MACHINE_RULES
from megalite.config.optimizer_rules import OPTIMIZER_RULES
from megalite.config.parallel_rules import PARALLEL_RULES
from megalite.config.remedies import Case, Flaw, Rule, problems_of
from megalite.config.run_names import NAME
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of
from megalite.errors.problems import Problem
from megalite.errors.remedies import divisors, multiples


def check(config: Config, world_size: int, doubtful: Collection[str] = ()) -> list[Problem]:
    """All problems of a config on `world_size` ranks. `doubtful` settings were refused before they entered it."""
    problems = list(bounds(config))
    refused = {*doubtful, *(problem.setting for problem in problems)}
    judged = with_defaults(config, {problem.setting for problem in problems})
    problems += problems_of(Case(judged, world_size), RULES, refused)
    found = (problem for rule in MACHINE_RULES for problem in rule(judged))
    return problems + [one for one in found if not Flaw(one.setting, one.rule).speaks_of(refused)]


# --- the model -----------------------------------------------------------------------------------------------------


def hidden_splits_over_heads(case: Case) -> Iterator[Flaw]:
    hidden, heads = case.config.model.hidden_size, case.config.model.num_attention_heads
    unit = 2 if case.config.model.position == "rope" else 1  # rotary heads are even
    if case.config.model.head_size is None and hidden % heads:
        fixes = {
            "model.hidden_size": multiples(unit * heads, hidden),
            "model.num_attention_heads": divisors(hidden, heads),
        }
        rule = f"does not split over model.num_attention_heads={heads}"
        yield Flaw("model.hidden_size", rule, fixes, "set model.head_size")


def query_heads_split_over_key_value_heads(case: Case) -> Iterator[Flaw]:
    heads, groups = case.config.model.num_attention_heads, case.config.model.num_key_value_heads
    if groups is not None and heads % groups:
        rule = f"model.num_attention_heads={heads} is not a multiple of it"
        yield Flaw("model.num_key_value_heads", rule, {"model.num_key_value_heads": divisors(heads, groups)})


def rotary_heads_are_even(case: Case) -> Iterator[Flaw]:
    model = case.config.model
    size = derive_model(model, 1).head_size or 1
    split = model.head_size is not None or model.hidden_size % model.num_attention_heads == 0
    if model.position == "rope" and split and size % 2:
        name = "model.head_size" if model.head_size is not None else "model.hidden_size"
        rule = f"gives heads of size {size}, and model.position=rope turns pairs of numbers, so it must be even"
        unit = 2 if model.head_size is not None else 2 * model.num_attention_heads
        yield Flaw(name, rule, {name: multiples(unit, case.value(name)), "model.position": ["learned"]})


def sequence_fits_learned_positions(case: Case) -> Iterator[Flaw]:
    length, positions = case.config.train.seq_length, case.config.model.max_positions
    if case.config.model.position == "learned" and positions is not None and length > positions:
        rule = f"longer than the table of learned positions, model.max_positions={positions}"
        fixes: dict[str, list[Any]] = {
            "train.seq_length": [positions],
            "model.max_positions": [length],
            "model.position": ["rope"],
        }
        yield Flaw("train.seq_length", rule, fixes)


def rotary_scaling_band_is_ordered(case: Case) -> Iterator[Flaw]:
    model = case.config.model
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if model.position == "rope" and model.rope_scaling_factor > 1 and high <= low:
        rule = f"must be above model.rope_low_frequency_factor={low:g} where model.rope_scaling_factor is above 1"
        yield Flaw("model.rope_high_frequency_factor", rule, {"model.rope_high_frequency_factor": [4 * low]})


def names_are_file_names(case: Case) -> Iterator[Flaw]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", case.config.model.name):
        rule = "part of the run folder's name, so letters, digits, '.', '_' and '-' only, a letter or digit first"
        yield Flaw("model.name", rule, {"model.name": ["my_model"]})
    if case.config.run_name is not None and not NAME.fullmatch(case.config.run_name):
        rule = "must be a name that any file system takes: letters, digits and ._=+-, at most 100, no dot or sign first"
        yield Flaw("run_name", rule, {"run_name": ["baseline-1"]}, "run_dir=PATH for a folder elsewhere")


# --- training ------------------------------------------------------------------------------------------------------


def recompute_has_an_effect(case: Case) -> Iterator[Flaw]:
    """What is asked for is done: the modules under selective, the layers under full. The defaults ask for nothing."""
    train, there = case.config.train, case.config.model.num_layers
    kind, layers, modules = train.recompute, train.recompute_layers, "train.recompute_modules"
    once, default = list(dict.fromkeys(train.recompute_modules)), SETTINGS[modules].default
    if kind == "selective" and not once:
        fixes: dict[str, list[Any]] = {"train.recompute": ["none"], modules: [default]}
        yield Flaw(modules, "train.recompute=selective needs some", fixes)
    if len(once) < len(train.recompute_modules):
        yield Flaw(modules, "names one more than once", {modules: [once]})
    if kind != "selective" and once and once != default:
        yield Flaw(modules, f"has no effect with train.recompute={kind}", {"train.recompute": ["selective"]})
    if layers is not None and kind != "full":
        fixes = {"train.recompute": ["full"], "train.recompute_layers": [None]}
        yield Flaw("train.recompute_layers", f"has no effect with train.recompute={kind}", fixes)
    elif layers is not None and layers > there:
        rule = f"more than model.num_layers={there}"
        yield Flaw("train.recompute_layers", rule, {"train.recompute_layers": [there, None]})


def schedule_fits_the_steps(case: Case) -> Iterator[Flaw]:
    steps, warmup, decay = case.config.train.steps, case.config.lr.warmup_steps or 0, case.config.lr.decay_steps or 0
    if warmup > steps:
        fixes = {"lr.warmup_steps": [min(100, steps // 10)], "train.steps": [warmup]}
        yield Flaw("lr.warmup_steps", f"the warm-up is longer than the run, train.steps={steps}", fixes)
    elif case.config.lr.schedule == "wsd" and warmup + decay > steps:
        fixes = {"lr.decay_steps": [min(steps // 5, steps - warmup)], "train.steps": [warmup + decay]}
        rule = f"with lr.warmup_steps={warmup} it is longer than the run, train.steps={steps}"
        yield Flaw("lr.decay_steps", rule, fixes)


def learning_rate_falls(case: Case) -> Iterator[Flaw]:
    peak, end = case.config.optimizer.lr, case.config.lr.min_lr
    if end is not None and end > peak:
        yield Flaw("lr.min_lr", f"above the peak, optimizer.lr={peak:g}", {"lr.min_lr": [peak / 10]})


def listed_steps_are_steps_of_the_run(case: Case) -> Iterator[Flaw]:
    steps = case.config.train.steps
    for name in ("train.skip_steps", "train.profile_steps"):
        listed: list[int] = value_of(case.config, name)
        if others := [step for step in listed if not 1 <= step <= steps]:
            rule = f"the steps of this run are 1 to train.steps={steps}, and {others[0]} is not"
            inside = [step for step in listed if step not in others]
            yield Flaw(name, rule, {name: [inside], "train.steps": [max(listed)]})


def profiled_steps_train(case: Case) -> Iterator[Flaw]:
    profiled, skipped = case.config.train.profile_steps, case.config.train.skip_steps
    if idle := [step for step in profiled if step in skipped]:
        rule = f"train.skip_steps passes over step {idle[0]}: there is nothing to record"
        others = [step for step in profiled if step not in idle]
        yield Flaw("train.profile_steps", rule, {"train.profile_steps": [others]})


# --- data ----------------------------------------------------------------------------------------------------------


def data_path_suits_the_source(case: Case) -> Iterator[Flaw]:
    source, path = case.config.data.source, case.config.data.path
    example = {"hf": "roneneldan/TinyStories", "tokens": "corpus"}.get(source, "book.txt")
    parts = path if isinstance(path, list) else [path]
    if source == "stdlib" and path is not None:
        yield Flaw("data.path", "data=stdlib reads Python's own source and takes no path", words="data=text for files")
    elif source != "stdlib" and (path is None or path == []):
        yield Flaw("data.path", f"data={source} needs to be told what to read", words=f"data.path={example}")
    elif path is not None and not all(
        isinstance(part, str | int) and not isinstance(part, bool) and str(part).strip() for part in parts
    ):
        rule = "must be text or a list of texts"
        yield Flaw("data.path", rule, words=f"data.path={example} or data.path=[one,two]")


def weights_suit_the_blend(case: Case) -> Iterator[Flaw]:
    weights, path = case.config.data.weights, case.config.data.path
    parts = len(path) if isinstance(path, list) else 1
    if weights is None:
        return
    if parts < 2:
        yield Flaw("data.weights", "only a data.path of several parts has shares", {"data.weights": [None]})
    elif len(weights) != parts or min(weights) <= 0:
        rule = f"{len(weights)} shares for the {parts} parts of data.path, each of which must have one above 0"
        yield Flaw("data.weights", rule, {"data.weights": [[1.0] * parts, None]})


def vocabulary_holds_the_tokens(case: Case) -> Iterator[Flaw]:
    size, trained = case.config.model.vocab_size, case.config.data.bpe_vocab_size
    if case.config.tokenizer == "bpe" and case.config.data.source != "tokens" and size is not None and size < trained:
        rule = f"smaller than the vocabulary that is trained on the data, data.bpe_vocab_size={trained}"
        fixes: dict[str, list[Any]] = {"model.vocab_size": [None], "data.bpe_vocab_size": [size], "tokenizer": ["char"]}
        yield Flaw("model.vocab_size", rule, fixes)


RULES: tuple[Rule, ...] = (
    *(hidden_splits_over_heads, query_heads_split_over_key_value_heads, rotary_heads_are_even),
    *(sequence_fits_learned_positions, rotary_scaling_band_is_ordered, names_are_file_names),
    *PARALLEL_RULES,
    *(recompute_has_an_effect, schedule_fits_the_steps, learning_rate_falls),
    *(listed_steps_are_steps_of_the_run, profiled_steps_train),
    *OPTIMIZER_RULES,
    *(data_path_suits_the_source, weights_suit_the_blend, vocabulary_holds_the_tokens),
)
