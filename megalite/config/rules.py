"""Every rule that a config must keep, in one flat list, and the check that asks them all.

`bounds.py` judges each setting on its own. A rule of `RULES` joins several and says by formula what would work
(`remedies.py`); those of ranks are in `parallel_rules.py`, those of the optimizer in `optimizer_rules.py`. What this
machine must have is in `machine_rules.py`. A rule that speaks of a setting that is already refused stays silent.
"""

import re
from collections.abc import Collection, Iterator
from itertools import islice
from math import pi
from typing import Any

from megalite.config.bounds import bounds
from megalite.config.context_rules import COMM, CONTEXT_RULES, CP
from megalite.config.derive import NAME, derive_compile, derive_model
from megalite.config.device_rules import graph_obstacles
from megalite.config.exchange import exchange_of
from megalite.config.machine_rules import MACHINE_RULES
from megalite.config.moe_rules import MOE_RULES
from megalite.config.optimizer_rules import OPTIMIZER_RULES
from megalite.config.parallel_rules import PARALLEL_RULES
from megalite.config.remedies import Case, Flaw, Rule, problems_of, splits
from megalite.config.schema import LEAST_FLEX_HEAD, Config
from megalite.config.settings import SETTINGS, with_values
from megalite.errors.problems import Problem
from megalite.errors.remedies import divisors, multiples
from megalite.errors.words import several

Fixes = dict[str, list[Any]]
LLAMA3_SCALING = ("low_frequency_factor", "high_frequency_factor")
YARN_SCALING = ("beta_slow", "beta_fast", "truncate", "attention_factor", "mscale", "mscale_all_dim")
LARGEST_SHARE = 1e12
LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
# (switch, value that it needs, settings, why): without that value (of a number: or more) the settings do nothing.
SWITCHED: list[tuple[str, Any, list[str], str]] = [
    ("train.recompute", "selective", ["train.recompute_modules"], ""),
    ("train.recompute", "full", ["train.recompute_layers"], ""),
    ("optimizer.zero", 1, ["optimizer.instances", "optimizer.ownership"], ": every rank holds all of the state"),
    ("model.position", "rope", ["model.rope_scaling_factor"], ""),
    ("model.rope_scaling", "llama3", [f"model.rope_{name}" for name in LLAMA3_SCALING], ""),
    ("model.rope_scaling", "yarn", [f"model.rope_{name}" for name in YARN_SCALING], ""),
    ("parallel.cp", 2, ["parallel.cp_comm", "parallel.cp_alltoall"], ""),
    ("precision", "fp16", [f"optimizer.{name}" for name in LOSS_SCALE], ": the loss is scaled in fp16 alone"),
]
# The same where the command itself gives the settings: what a preset or a recipe says besides may stay unused.
ASKED: list[tuple[str, Any, list[str], str]] = [
    ("data.source", "hf", ["data.subset", "data.split", "data.streaming"], "")
]
# The same where a run says that they do nothing, and goes on: their switch is turned for a try and back.
UNUSED: list[tuple[str, Any, list[str], str]] = [
    ("tokenizer", "bpe", ["data.bpe_vocab_size"], ""),
    ("lr.schedule", "wsd", ["lr.decay_steps"], ""),
    ("model.position", "rope", ["model.rope_theta"], ""),
    ("model.position", "learned", ["model.max_positions"], ""),
    ("train.sample_tokens", 1, ["train.sample_interval", "train.sample_prompts"], ""),
    ("train.eval_interval", 1, ["train.eval_batches"], ""),
]


def check(config: Config, world_size: int, doubtful: Collection[str] = ()) -> list[Problem]:
    """All problems of a config on `world_size` ranks. `doubtful` settings were refused before they entered it."""
    problems = list(bounds(config))
    refused = {*doubtful, *(problem.setting for problem in problems)}
    # Rules compute with the defaults of what bounds refuse.
    judged = with_values(config, {problem.setting: SETTINGS[problem.setting].default for problem in problems})
    problems += problems_of(Case(judged, world_size), RULES, refused)
    found = (problem for rule in MACHINE_RULES for problem in rule(judged))
    return problems + [one for one in found if not Flaw(one.setting, one.rule).speaks_of(refused)]


def heads_share_the_width(case: Case) -> Iterator[Flaw]:
    model = case.config.model
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    if not model.head_size:
        yield from splits(case, "model.hidden_size", "model.num_attention_heads", words="set model.head_size")
    if groups is not None and heads % groups:
        rule = f"model.num_attention_heads={heads} is not a multiple of it"
        yield Flaw("model.num_key_value_heads", rule, {"model.num_key_value_heads": divisors(heads, groups)})
    size = model.head_size or model.hidden_size / heads
    if model.position == "rope" and size % 2 == 1:
        name, unit = ("model.head_size", 2) if model.head_size else ("model.hidden_size", 2 * heads)
        rule = f"gives heads of size {size:g}, and model.position=rope turns pairs of numbers, so it must be even"
        yield Flaw(name, rule, {name: multiples(unit, case.value(name)), "model.position": ["learned"]})


def positions_suit_the_sequence(case: Case) -> Iterator[Flaw]:
    model, length = case.config.model, case.config.train.seq_length
    if model.position == "learned" and model.max_positions is not None and length > model.max_positions:
        rule = f"longer than the table of learned positions, {case.show('model.max_positions')}"
        fixes: Fixes = {"train.seq_length": [model.max_positions], "model.max_positions": [length]}
        yield Flaw("train.seq_length", rule, fixes | {"model.position": ["rope"]})


def rotary_scaling_is_told_in_full(case: Case) -> Iterator[Flaw]:
    model, kind, factor = case.config.model, "model.rope_scaling", "model.rope_scaling_factor"
    if model.rope_scaling_factor == 1:
        if model.rope_scaling != SETTINGS[kind].default:
            fixes: Fixes = {kind: [SETTINGS[kind].default]}
            yield Flaw(kind, f"has no effect with {case.show(factor)}", fixes, f"{factor}=N above 1")
        return
    if model.position != "rope" or model.rope_scaling == "linear":
        return
    original = model.rope_original_positions
    if not original:
        before = max(1, int(case.config.train.seq_length / model.rope_scaling_factor))
        fixes = {"model.rope_original_positions": [before], kind: ["linear"]}
        rule = f"must be set, to the context length before scaling: {case.show(kind)} counts turns in it"
        yield Flaw("model.rope_original_positions", rule, fixes)
    below, above = "model.rope_low_frequency_factor", "model.rope_high_frequency_factor"
    if model.rope_scaling == "yarn":
        below, above = "model.rope_beta_slow", "model.rope_beta_fast"
    low, high = case.value(below), case.value(above)
    if high <= low:
        rule = f"must be above {below}={low:g} where model.rope_scaling_factor is above 1"
        yield Flaw(above, rule, {above: [SETTINGS[above].default * low]})
    if model.rope_scaling == "yarn":
        yield from _yarn_scales_something(case, original)


def _yarn_scales_something(case: Case, original: int | None) -> Iterator[Flaw]:
    model, theta = case.config.model, "model.rope_theta"
    if model.rope_theta <= 1:
        yield Flaw(theta, "with model.rope_scaling=yarn must be above 1: frequencies fall", {theta: [10000.0]})
    least = 2 * pi * model.rope_beta_slow  # positions in which the first pair, at one radian each, turns so many times
    if original is not None and original <= least:
        rule = f"no dimension turns model.rope_beta_slow={model.rope_beta_slow:g} times in so few"
        fixes: Fixes = {"model.rope_original_positions": [int(least) + 1], "model.rope_scaling": ["linear"]}
        yield Flaw("model.rope_original_positions", rule, fixes)
    scales = ("model.rope_mscale", "model.rope_mscale_all_dim")
    given = [name for name in scales if case.value(name) is not None]
    if given and model.rope_attention_factor is not None:
        rule = f"stands in place of {' and '.join(given)}: one of both"
        yield Flaw("model.rope_attention_factor", rule, {"model.rope_attention_factor": [None]})
    elif len(given) == 1:
        (other,) = set(scales) - {*given}
        yield Flaw(given[0], f"has no effect without {other}", {given[0]: [None], other: [1.0]})


def names_are_file_names(case: Case) -> Iterator[Flaw]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", case.config.model.name):
        rule = "part of the run folder's name, so at most 64 of a-z, A-Z, 0-9, '.', '_', '-', a letter or digit first"
        yield Flaw("model.name", rule, {"model.name": ["my_model"]})
    if case.config.run_name is not None and not NAME.fullmatch(case.config.run_name):
        rule = "must be a name that any file system takes: letters, digits and ._=+-, at most 100, no dot or sign first"
        yield Flaw("run_name", rule, {"run_name": ["baseline-1"]}, "run_dir=PATH for a folder elsewhere")


def settings_have_an_effect(case: Case) -> Iterator[Flaw]:
    """What is asked for is done. The default asks for nothing, and so does an empty list."""
    yield from _without_effect(case, SWITCHED)
    yield from (flaw for flaw in _without_effect(case, ASKED) if flaw.setting in case.config.departures)


def unused(config: Config) -> list[str]:
    """The settings of the command that do nothing in this run, in words."""
    flaws = _without_effect(Case(config, 1), UNUSED)
    return [f"{flaw.setting} {flaw.rule}" for flaw in flaws if flaw.setting in config.departures]


def _without_effect(case: Case, table: list[tuple[str, Any, list[str], str]]) -> Iterator[Flaw]:
    for switch, needed, names, why in table:
        value = case.value(switch)
        for name in () if value == needed or (isinstance(needed, int) and value > needed) else names:
            default = SETTINGS[name].default
            if case.value(name) not in (default, []):
                rule = f"has no effect with {case.show(switch)}{why}"
                yield Flaw(name, rule, {switch: [needed], name: [default]})


def recompute_names_what_there_is(case: Case) -> Iterator[Flaw]:
    name, layers, there = "train.recompute_modules", case.config.train.recompute_layers, case.config.model.num_layers
    modules = case.config.train.recompute_modules
    if case.config.train.recompute == "selective" and not modules:
        fixes: Fixes = {"train.recompute": ["none"], name: [SETTINGS[name].default]}
        yield Flaw(name, "train.recompute=selective needs some", fixes)
    if (once := list(dict.fromkeys(modules))) != modules:
        yield Flaw(name, "names one more than once", {name: [once]})
    if case.config.train.recompute == "full" and layers is not None and layers > there:
        fixes = {"train.recompute_layers": [there, None]}
        yield Flaw("train.recompute_layers", f"more than model.num_layers={there}", fixes)


def attention_kernels_can_run(case: Case) -> Iterator[Flaw]:
    """The chosen ones; `auto` always finds some."""
    train, model, data, name = case.config.train, case.config.model, case.config.data, "train.attention"
    if train.attention == "auto":
        return
    auto: Fixes = {name: ["auto"]}
    dropped = model.dropout if model.attention_dropout is None else model.attention_dropout
    if case.config.device == "cpu":
        yield Flaw(name, "has no effect with device=cpu", auto)
    elif dropped:
        rule = "has no effect with dropout on attention's probabilities, which takes plain products"
        yield Flaw(name, rule, {**auto, "model.attention_dropout": [0.0]})
    elif case.value(CP) > 1 and (exchange := exchange_of(case.config)).ring > 1:
        rule = f"has no effect with {case.show(CP)}, whose ranks compute tiles of their own ({COMM}: {exchange.name})"
        yield Flaw(name, rule, {**auto, COMM: ["alltoall"]})
    elif train.attention == "flex":
        if derive_compile(case.config) is False:
            by = "parallel.schedule" if train.compile is None else "train.compile"
            fixes: Fixes = {"train.compile": [True], "parallel.schedule": ["1f1b", "interleaved"]}
            yield Flaw(name, f"flex attention must be compiled, and is not with {case.show(by)}", {**auto, **fixes})
        if case.config.precision == "fp64":
            yield Flaw(name, "flex attention has no fp64", {**auto, "precision": ["fp32", "bf16"]})
        elif (size := derive_model(model, train.seq_length).head_size or 0) < LEAST_FLEX_HEAD:
            rule = f"flex attention takes heads of size {LEAST_FLEX_HEAD} and more, and these have {size}"
            yield Flaw(name, rule, {**auto, "model.head_size": [LEAST_FLEX_HEAD]})
    elif not data.cross_document_attention:
        rule = "these kernels do not keep attention inside documents (data.cross_document_attention=false)"
        yield Flaw(name, rule, {name: ["auto", "flex"]})
    elif case.config.precision in ("fp32", "fp64"):
        yield Flaw(name, f"these kernels take 16 bits, not {case.show('precision')}", {**auto, "precision": ["bf16"]})


def microbatches_can_be_a_graph(case: Case) -> Iterator[Flaw]:
    name, works = "train.cuda_graph", {"data.cross_document_attention": True}
    for rule, names in graph_obstacles(case.config, case.world_size) if case.config.train.cuda_graph else ():
        yield Flaw(name, rule, {**{other: [works.get(other, 0.0)] for other in names}, name: [None]})


def fp8_products_have_sizes_that_fit(case: Case) -> Iterator[Flaw]:
    """torch's fp8 product takes weights of which both sizes are multiples of 16, on each rank of tp."""
    name, tp, layers = "train.fp8", case.config.parallel.tp, case.config.model.num_layers
    if case.config.train.fp8 is None:
        return
    if layers < 3:
        rule = f"leaves the first and the last block in bf16, and there are no others ({case.show('model.num_layers')})"
        yield Flaw(name, rule, {"model.num_layers": [3], name: [None]})
    model = derive_model(case.config.model, case.config.train.seq_length)
    heads, groups, d = model.num_attention_heads, model.num_key_value_heads or 1, model.head_size or 1
    inner = 0 if all(map(model.has_experts, range(1, layers - 1))) else model.ffn_hidden_size or 0
    if heads % tp or inner % tp:  # refused already
        return
    sizes = {
        "model.hidden_size": model.hidden_size,
        "attention's inputs": heads // tp * d,
        "attention's outputs": (heads // tp + 2 * max(1, groups // tp)) * d,
        "model.ffn_hidden_size": inner // tp,
    }
    if unfit := [f"{what} ({size})" for what, size in sizes.items() if size % 16]:
        of_a_rank = f" on each rank of {case.show('parallel.tp')}" if tp > 1 else ""
        rule = f"takes sizes that are multiples of 16, and these are not{of_a_rank}: {', '.join(unfit)}"
        fixes: Fixes = {"parallel.tp": [*divisors(tp, tp)]}
        for one, unit in (("head_size", 16), ("hidden_size", 16 * heads), ("ffn_hidden_size", 16 * tp)):
            fixes[f"model.{one}"] = [*islice(multiples(unit, getattr(model, one)), 4)]
        yield Flaw(name, rule, {**fixes, name: [None]})


def learning_rate_follows_its_schedule(case: Case) -> Iterator[Flaw]:
    steps, lr, peak = case.config.train.steps, case.config.lr, case.config.optimizer.lr
    warmup, decay = lr.warmup_steps or 0, lr.decay_steps or 0
    if warmup > steps:
        fixes = {"lr.warmup_steps": [min(100, steps // 10)], "train.steps": [warmup]}
        yield Flaw("lr.warmup_steps", f"the warm-up is longer than the run, train.steps={steps}", fixes)
    elif lr.schedule == "wsd" and warmup + decay > steps:
        fixes = {"lr.decay_steps": [min(steps // 5, steps - warmup)], "train.steps": [warmup + decay]}
        rule = f"with lr.warmup_steps={warmup} it is longer than the run, train.steps={steps}"
        yield Flaw("lr.decay_steps", rule, fixes)
    if lr.min_lr is not None and lr.min_lr > peak:
        yield Flaw("lr.min_lr", f"above the peak, optimizer.lr={peak:g}", {"lr.min_lr": [peak / 10]})


def listed_steps_are_steps_of_the_run(case: Case) -> Iterator[Flaw]:
    train = case.config.train
    for name, listed in (("train.skip_steps", train.skip_steps), ("train.profile_steps", train.profile_steps)):
        if others := [step for step in listed if not 1 <= step <= train.steps]:
            rule = f"the steps of this run are 1 to train.steps={train.steps}, and {others[0]} is not"
            inside = [step for step in listed if step not in others]
            yield Flaw(name, rule, {name: [inside], "train.steps": [max(listed)]})
    if idle := [step for step in train.profile_steps if step in train.skip_steps]:
        rule = f"train.skip_steps passes over step {idle[0]}: there is nothing to record"
        others = [step for step in train.profile_steps if step not in idle]
        yield Flaw("train.profile_steps", rule, {"train.profile_steps": [others]})


def data_suits_its_source(case: Case) -> Iterator[Flaw]:
    data = case.config.data
    parts = data.path if isinstance(data.path, list) else [data.path]
    example = {"hf": "roneneldan/TinyStories", "tokens": "corpus"}.get(data.source, "book.txt")
    if data.source == "stdlib" and data.path is not None:
        yield Flaw("data.path", "data=stdlib reads Python's own source and takes no path", words="data=text for files")
    elif data.source != "stdlib" and data.path in (None, []):
        yield Flaw("data.path", f"data={data.source} needs to be told what to read", words=f"data.path={example}")
    elif data.path is not None and not all(type(part) in (str, int) and str(part).strip() for part in parts):
        rule, words = "must be text or a list of texts", f"data.path={example} or data.path=[one,two]"
        yield Flaw("data.path", rule, words=words)
    if data.weights is not None and len(parts) < 2:
        yield Flaw("data.weights", "only a data.path of several parts has shares", {"data.weights": [None]})
    elif data.weights is not None and len(data.weights) != len(parts):
        rule = f"{several(len(data.weights), 'share')} for the {len(parts)} parts of data.path"
        yield Flaw("data.weights", rule, {"data.weights": [[1.0] * len(parts), None]})
    elif data.weights is not None and max(data.weights) / LARGEST_SHARE > min(data.weights):
        rule = f"the largest share is more than {LARGEST_SHARE:,.0f} times the smallest"
        yield Flaw("data.weights", rule, {"data.weights": [[1.0] * len(parts), None]})


def vocabulary_holds_the_tokens(case: Case) -> Iterator[Flaw]:
    size, tokenizer, trained = case.config.model.vocab_size, case.config.tokenizer, case.config.data.bpe_vocab_size
    made, weights = {"bpe": trained, "byte": 257}.get(tokenizer, 0), case.config.checkpoint.init_from
    if case.config.data.source == "tokens" or size is None or size >= made:
        return
    fixes: Fixes = {"data.bpe_vocab_size": [size]} if tokenizer == "bpe" else {}
    if weights is not None:
        yield Flaw("tokenizer", f"has {made} tokens, and the weights know {size}", fixes, f"tokenizer={weights}")
        return
    rule = "that is trained on the data, data.bpe_vocab_size=" if fixes else f"of tokenizer={tokenizer}, "
    fixes |= {"model.vocab_size": [None], "tokenizer": ["char"]}
    yield Flaw("model.vocab_size", f"smaller than the vocabulary {rule}{made}", fixes)


RULES: tuple[Rule, ...] = (
    *(heads_share_the_width, positions_suit_the_sequence, rotary_scaling_is_told_in_full, names_are_file_names),
    *(*PARALLEL_RULES, *CONTEXT_RULES, *MOE_RULES),
    *(recompute_names_what_there_is, attention_kernels_can_run, microbatches_can_be_a_graph),
    *(fp8_products_have_sizes_that_fit,),
    *(learning_rate_follows_its_schedule, listed_steps_are_steps_of_the_run),
    *(*OPTIMIZER_RULES, settings_have_an_effect),
    *(data_suits_its_source, vocabulary_holds_the_tokens),
)
