"""Every rule that a config must keep, in one flat list, and the check that asks them all.

`bounds.py` judges each setting on its own, a rule of `RULES` joins several (`rule.py` says what a rule is). What this
machine must have is in `machine_rules.py`. A rule that speaks of a setting that is already refused stays silent.
"""

import re
from collections.abc import Collection, Iterator
from ctypes import c_float
from typing import Any

from megalite.config.bounds import bounds, outside
from megalite.config.derive import NAME
from megalite.config.device_rules import graph_obstacles, precision_clashes
from megalite.config.exchange import exchange_of
from megalite.config.hints import problems_of
from megalite.config.machine_rules import MACHINE_RULES
from megalite.config.model_rules import MODEL_RULES
from megalite.config.parallel_rules import PARALLEL_RULES
from megalite.config.rule import Broken, Case, Row, broken, full_name
from megalite.config.schema import LEAST_FLEX_HEAD, Config
from megalite.config.settings import SETTINGS, with_values
from megalite.errors.problems import Problem

LARGEST_SHARE = 1e12
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
ROUNDED = [one for one in SETTINGS.values() if one.kind in (float, list[float]) and one.group != "data"]

# Settings that stay at their defaults unless a switch has the value needed, or a larger number: without it they have no
# effect. (switch, value, settings, why)
Inert = tuple[str, Any, str, str]
EXPERTS = "model.moe.num_experts"
OF_EXPERTS = " ".join(name for name in SETTINGS if name.startswith("model.moe.") and name != EXPERTS)
INERT: list[Inert] = [
    ("train.recompute", "selective", "recompute_modules", ""),
    ("train.recompute", "full", "recompute_layers", ""),
    ("zero", 1, "instances ownership", ": every rank holds all of the state"),
    ("position", "rope", "rope_scaling_factor", ""),
    ("rope_scaling", "llama3", "rope_low_frequency_factor rope_high_frequency_factor", ""),
    ("rope_scaling", "yarn", "rope_beta_slow rope_beta_fast rope_truncate rope_attention_factor", ""),
    ("rope_scaling", "yarn", "rope_mscale rope_mscale_all_dim", ""),
    ("cp", 2, "cp_comm cp_alltoall", ""),
    ("tp", 2, "async_tp", ""),
    ("num_experts", 1, "ep", ""),
    ("score", "softmax", "pre_softmax", ""),
    ("precision", "fp16", "initial_loss_scale min_loss_scale loss_scale_window hysteresis", ": only fp16 is scaled"),
]
# The same where the command itself gives the settings: what a preset or a recipe says besides may stay unused.
ASKED: list[Inert] = [("data.source", "hf", "subset split streaming", "")]
# The same where a run says that they do nothing, and goes on: their switch is turned for a try and back.
UNUSED: list[Inert] = [
    ("tokenizer", "bpe", "bpe_vocab_size", ""),
    ("lr.schedule", "wsd", "decay_steps", ""),
    ("position", "rope", "rope_theta", ""),
    ("position", "learned", "max_positions", ""),
    ("sample_tokens", 1, "sample_interval sample_prompts", ""),
    ("eval_interval", 1, "eval_batches", ""),
]


def check(config: Config, world_size: int, doubtful: Collection[str] = ()) -> list[Problem]:
    """All problems of a config on `world_size` ranks. `doubtful` settings were refused before they entered it."""
    problems = list(bounds(config))
    refused = {*doubtful, *(problem.setting for problem in problems)}
    # Rules compute with the defaults of what bounds refuse.
    judged = with_values(config, {problem.setting: SETTINGS[problem.setting].default for problem in problems})
    problems += problems_of(Case(judged, world_size), RULES, refused)
    found = (problem for rule in MACHINE_RULES for problem in rule(judged))
    return problems + [one for one in found if not Broken((one.setting,), one.rule).speaks_of(refused)]


def unused(config: Config) -> list[str]:
    """The settings of the command that do nothing in this run, in words."""
    found = broken(Case(config, 1), [lambda case: without_effect(case, UNUSED, case.config.departures)])
    return [f"{one.names[0]} {one.rule}" for one in found]


def without_effect(case: Case, table: list[Inert], given: Collection[str] = SETTINGS) -> Iterator[Row]:
    """The rows of a table that are broken by settings in `given`."""
    for switch, needed, names, why in table:
        value = case.value(full_name(switch))
        on = value == needed or (isinstance(needed, int) and value > needed)
        for name in map(full_name, () if on else names.split()):
            idle = name in given and case.given(name) not in (SETTINGS[name].default, [])
            yield idle, f"{name} {switch}", f"has no effect with {{1}}{why}"


def settings_have_an_effect(case: Case) -> Iterator[Row]:
    """What is asked for is done; what a preset says of experts that the command takes away may stay."""
    departures = case.config.departures
    yield from without_effect(case, INERT)
    yield from without_effect(case, ASKED, departures)
    yield from without_effect(case, [(EXPERTS, 1, OF_EXPERTS, "")], departures if EXPERTS in departures else SETTINGS)


def names_are_file_names(case: Case) -> Iterator[Row]:
    model, run = case.config.model.name, case.config.run_name
    rule = "part of the run folder's name, so at most 64 of a-z, A-Z, 0-9, '.', '_', '-', a letter or digit first"
    yield not MODEL_NAME.fullmatch(model), "model.name", rule
    rule = "must be a name that any file system takes: letters, digits and ._=+-, at most 100, no dot or sign first"
    yield run is not None and not NAME.fullmatch(run), "run_name", rule, "run_dir=PATH for a folder elsewhere"


def recompute_names_what_there_is(case: Case) -> Iterator[Row]:
    train, layers = case.config.train, case.config.train.recompute_layers or 0
    some = train.recompute_modules
    yield not some and train.recompute == "selective", "recompute_modules train.recompute", "{1} needs some"
    yield len({*some}) < len(some), "recompute_modules", "names one more than once"
    yield layers > case.config.model.num_layers, "recompute_layers num_layers", "more than {1}"


def attention_kernels_can_run(case: Case) -> Iterator[Row]:
    """The chosen ones; `auto` always finds some."""
    config, model, kernels = case.config, case.derived.model, case.config.train.attention
    if kernels == "auto":
        return
    flex, exchange, head = kernels == "flex", exchange_of(config), model.head_size
    tiles = config.parallel.cp > 1 and exchange.ring > 1
    yield config.device == "cpu", "attention", "has no effect with device=cpu"
    rule = "has no effect with dropout on attention's probabilities, which takes plain products"
    yield model.attention_dropout, "attention attention_dropout", rule
    rule = f"has no effect with {{2}}, whose ranks compute tiles of their own ({exchange.name})"
    yield tiles, "attention cp_comm cp", rule
    rule = "flex attention must be compiled, and is not with {1} and {2}"
    yield flex and case.derived.train.compile is False, "attention compile parallel.schedule", rule
    yield flex and head < LEAST_FLEX_HEAD, "attention head_size", f"takes heads of size {LEAST_FLEX_HEAD} and more"
    rule = "these kernels do not keep attention inside documents ({1})"
    yield not flex and not config.data.cross_document_attention, "attention cross_document_attention", rule
    wide = config.precision == "fp64" or (config.precision == "fp32" and not flex)
    yield wide, "attention precision", "these kernels do not take {1}"


def products_can_send(case: Case) -> Iterator[Row]:
    """parallel.async_tp has an effect. What the machine must have for it is known later (train/device_settings.py)."""
    config, axes = case.config, case.derived.parallel
    if axes.tp == 1 or not axes.async_tp:
        return
    yield not axes.sequence_parallel, "async_tp sequence_parallel", "has no effect with {1}"
    rule = "is the compiler's, and has no effect with {1} and {2}"
    yield case.derived.train.compile is False, "async_tp compile parallel.schedule", rule
    yield config.device == "cpu", "async_tp", "has no effect with device=cpu"
    rule = "joins a gather and the product behind it, and {1} rounds what lies between"
    yield config.train.fp8 is not None, "async_tp fp8", rule


def microbatches_can_be_a_graph(case: Case) -> Iterator[Row]:
    for rule, names in graph_obstacles(case.config, case.world_size) if case.config.train.cuda_graph else ():
        yield True, " ".join(("cuda_graph", *names)), rule


def fp8_products_have_sizes_that_fit(case: Case) -> Iterator[Row]:
    """torch's fp8 product takes weights of which both sizes are multiples of 16, on each rank of tp."""
    model, tp, layers = case.derived.model, case.config.parallel.tp, case.config.model.num_layers
    heads, groups, d = model.num_attention_heads, model.num_key_value_heads, model.head_size
    inner = 0 if all(map(model.has_experts, range(1, layers - 1))) else model.ffn_hidden_size
    if case.config.train.fp8 is None:
        return
    yield layers < 3, "fp8 num_layers", "leaves the first and the last block in bf16, and there are no others ({1})"
    sizes = {
        "model.hidden_size": model.hidden_size,
        "attention's inputs": heads // tp * d,
        "attention's outputs": (heads // tp + 2 * max(1, groups // tp)) * d,
        "model.ffn_hidden_size": inner // tp,
    }
    unfit = [f"{what} ({size})" for what, size in sizes.items() if size % 16]
    rule = f"takes sizes that are multiples of 16, and on a rank of {{1}} these are not: {', '.join(unfit)}"
    splits = heads % tp == inner % tp == 0  # else another rule says so
    yield unfit and splits, f"fp8 tp head_size model.hidden_size model.ffn_hidden_size {16 * heads} {16 * tp}", rule


def steps_are_steps_of_the_run(case: Case) -> Iterator[Row]:
    train, lr = case.config.train, case.config.lr
    steps, warmup = train.steps, lr.warmup_steps or 0
    late = lr.schedule == "wsd" and warmup <= steps < warmup + (lr.decay_steps or 0)
    yield warmup > steps, "warmup_steps steps", "the warm-up is longer than the run, {1}"
    yield late, "decay_steps warmup_steps train.steps", "with {1} it is longer than the run, {2}"
    for name, listed in (("skip_steps", train.skip_steps), ("profile_steps", train.profile_steps)):
        beyond = next((step for step in listed if not 1 <= step <= steps), None)
        rule = f"the steps of this run are 1 to {{1}}, and {beyond} is not"
        yield beyond is not None, f"{name} train.steps {max(listed, default=1)}", rule
    idle = {*train.profile_steps} & {*train.skip_steps}
    yield idle, "profile_steps skip_steps", f"{{1}} passes over {sorted(idle)}: there is nothing to record"


def numbers_are_held_as_asked(case: Case) -> Iterator[Row]:
    """A precision of auto is judged at the start, where the device has chosen."""
    config, optimizer, betas = case.config, case.config.optimizer, case.config.optimizer.betas
    least, sent = config.lr.min_lr or 0, (optimizer.gradient_dtype, optimizer.communication_dtype)
    yield least > optimizer.lr, "min_lr optimizer.lr", "above the peak, {1}"
    yield len(betas) != 2, "betas", "must be two numbers"
    rule = "with {1} it sends twice the bytes of sums that are rounded already"
    yield sent == ("bf16", "fp32"), "communication_dtype gradient_dtype", rule
    small = (
        optimizer.moment_dtype == "bf16" and betas and 1 - 2**-8 <= betas[0] < 1
    )  # half an ulp of bf16: at most 2^-8
    yield small, "moment_dtype betas", "with {1} a step takes less of the first moment than bf16 rounds away"
    for name, rule in precision_clashes(config, config.precision) if config.precision != "auto" else ():
        yield True, f"{name} precision", rule
    above = config.precision == "fp16" and optimizer.min_loss_scale > optimizer.initial_loss_scale
    yield above, "min_loss_scale initial_loss_scale", "above where the scale starts, {1}"


def fp32_holds_the_numbers(case: Case) -> Iterator[Row]:
    """What is no number, nothing, or out of bounds once it is rounded. Shares of data are counted exactly."""
    for setting in ROUNDED if case.config.precision != "fp64" else ():
        value = case.given(setting.name)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        held = ((one, c_float(one).value) for one in numbers)
        wrong = next((there for one, there in held if (one and not there) or outside(setting, there)), None)
        rule = f"fp32 holds it as {wrong}, and the precision is {case.config.precision}"
        yield wrong is not None, f"{setting.name} precision", rule


def data_suits_its_source(case: Case) -> Iterator[Row]:
    data = case.config.data
    parts = data.path if isinstance(data.path, list) else [data.path]
    example = {"hf": "roneneldan/TinyStories", "tokens": "corpus"}.get(data.source, "book.txt")
    none, stdlib, shares = data.path in (None, []), data.source == "stdlib", data.weights or []
    unusable = not none and not all(type(part) in (str, int) and str(part).strip() for part in parts)
    rule = "data=stdlib reads Python's own source and takes no path"
    yield stdlib and data.path is not None, "data.path", rule, "data=text for files"
    rule = f"data={data.source} needs to be told what to read"
    yield not stdlib and none, "data.path", rule, f"data.path={example}"
    advice = f"data.path={example} or data.path=[one,two]"
    yield not stdlib and unusable, "data.path", "must be text or a list of texts", advice
    uneven = shares and not 1 < len(shares) == len(parts)
    yield uneven, "data.weights", f"must be as many as data.path has parts, {len(parts)}, and at least two"
    rule = f"the largest share is more than {LARGEST_SHARE:,.0f} times the smallest"
    yield shares and not uneven and max(shares) / LARGEST_SHARE > min(shares), "data.weights", rule


def vocabulary_holds_the_tokens(case: Case) -> Iterator[Row]:
    config, size, bpe = case.config, case.given("model.vocab_size"), case.config.tokenizer == "bpe"
    made = {"bpe": config.data.bpe_vocab_size, "byte": 257}.get(config.tokenizer, 0)
    if config.data.source == "tokens" or size is None or size >= made:
        return
    name = "bpe_vocab_size" if bpe else ""
    if (weights := config.checkpoint.init_from) is not None:
        yield True, f"tokenizer {name}", f"has {made} tokens, and the weights know {size}", f"tokenizer={weights}"
    else:
        of_what = "that is trained on the data, {1}" if bpe else f"of tokenizer={config.tokenizer}, {made}"
        yield True, f"model.vocab_size {name}", f"smaller than the vocabulary {of_what}", "tokenizer=char"


RULES = (
    *(*MODEL_RULES, names_are_file_names, *PARALLEL_RULES, settings_have_an_effect, recompute_names_what_there_is),
    *(attention_kernels_can_run, products_can_send, microbatches_can_be_a_graph, fp8_products_have_sizes_that_fit),
    *(steps_are_steps_of_the_run, numbers_are_held_as_asked, fp32_holds_the_numbers),
    *(data_suits_its_source, vocabulary_holds_the_tokens),
)
